"""Drives `tandem serve` with the official openai client, as any user would (see ../serve_check)."""

import argparse
import asyncio
import json
import sys
import time
from typing import Literal

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from common import Checks, DEFAULT_TANDEM, Server, assert_idle, find_tandem, model_folder

QUESTION = [{"role": "user", "content": "Where shall we go? Où? 日本?"}]
LONG = 2500  # tokens: random weights end what a grammar allows them to end long before

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "book_trip",
            "description": "Books a trip",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Rome", "Oslo"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 30},
                    "note": {"type": "string", "maxLength": 20},
                    "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
                },
                "required": ["city", "days", "note"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "give_up", "parameters": {"type": "object", "properties": {}}},
    },
]


class Leg(BaseModel):
    city: Literal["Rome", "Oslo", "Kyōto"]
    nights: int


class Trip(BaseModel):
    title: str
    price: float
    with_train: bool
    legs: list[Leg]


class OpenaiClient:
    """Each method that starts with `check_` is a check; its docstring is what it is called."""

    def __init__(self, server):
        self.server = server
        self.client = OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        self.model = self.client.models.list().data[0].id

    def chat(self, **fields):
        fields = {"messages": QUESTION, "max_tokens": 48, "reasoning_effort": "none"} | fields
        return self.client.chat.completions.create(model=self.model, **fields)

    def complete(self, prompt, **fields):
        fields = {"max_tokens": 32, "temperature": 0} | fields
        return self.client.completions.create(model=self.model, prompt=prompt, **fields)

    def check_models(self):
        """models.list, models.retrieve"""
        models = list(self.client.models.list())
        assert len(models) == 1 and models[0].object == "model", models
        assert self.client.models.retrieve(self.model).id == self.model

    def check_chat(self):
        """chat"""
        answer = self.chat()
        choice = answer.choices[0]
        assert choice.message.role == "assistant" and isinstance(choice.message.content, str)
        assert choice.finish_reason in ("stop", "length"), choice.finish_reason
        usage = answer.usage
        assert usage.prompt_tokens > 0 and 0 < usage.completion_tokens <= 48, usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
        assert choice.message.tool_calls is None and choice.message.refusal is None

    def check_conversation(self):
        """chat of several turns, developer and tool messages"""
        call = {"id": "c1", "type": "function", "function": {"name": "give_up", "arguments": "{}"}}
        messages = [
            {"role": "developer", "content": "Be short."},
            *QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "gave up"},
            {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
        ]
        assert self.chat(messages=messages, tools=TOOLS).choices[0].message.content is not None

    def check_stream(self):
        """streamed chat with usage equals the whole one"""
        for effort in ("none", "high"):
            fields = {"temperature": 0, "reasoning_effort": effort, "max_tokens": 120}
            whole = self.chat(**fields)
            text, reasoning, finishes, usages = "", "", [], []
            for chunk in self.chat(**fields, stream=True, stream_options={"include_usage": True}):
                assert chunk.object == "chat.completion.chunk"
                if chunk.usage:
                    assert chunk.choices == []
                    usages.append(chunk.usage)
                for choice in chunk.choices:
                    assert not finishes, "a chunk after the finish"
                    text += choice.delta.content or ""
                    reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                    finishes += [choice.finish_reason] if choice.finish_reason else []
            message = whole.choices[0].message
            assert text == message.content, (text, message.content)
            assert reasoning == (message.reasoning_content or ""), (reasoning, message)
            assert finishes == [whole.choices[0].finish_reason], finishes
            assert len(usages) == 1 and usages[0].completion_tokens == whole.usage.completion_tokens

    def check_stream_helper(self):
        """chat.completions.stream, the client's own accumulation"""
        # The helper takes an answer of finish_reason length for an error, so this one ends before.
        fields = {"model": self.model, "messages": QUESTION, "max_tokens": LONG, "temperature": 0,
                  "reasoning_effort": "none", "stop": [*"aeiou "]}
        with self.client.chat.completions.stream(**fields) as stream:
            events = [event.type for event in stream]
            final = stream.get_final_completion()
        assert "chunk" in events, events
        whole = self.client.chat.completions.create(**fields)
        assert final.choices[0].message.content == whole.choices[0].message.content

    @staticmethod
    def assert_calls(choice, names):
        calls = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and calls, choice
        for call in calls:
            assert call.type == "function" and call.id and call.function.name in names, call
            arguments = json.loads(call.function.arguments)
            if call.function.name == "give_up":
                assert arguments == {}, arguments
                continue
            assert set(arguments) <= {"city", "days", "note", "flags"}, arguments
            assert arguments["city"] in ("Rome", "Oslo") and 1 <= arguments["days"] <= 30, arguments
            assert isinstance(arguments["note"], str) and len(arguments["note"]) <= 20, arguments
            assert all(isinstance(flag, bool) for flag in arguments.get("flags", [])), arguments
        assert len({call.id for call in calls}) == len(calls), "ids repeat"
        return len(calls)

    def check_tools_required(self):
        """tool_choice required: complete calls with valid arguments"""
        total = 0
        for seed in range(8):
            answer = self.chat(tools=TOOLS, tool_choice="required", max_tokens=LONG, seed=seed)
            total += self.assert_calls(answer.choices[0], {"book_trip", "give_up"})
        return f"{total} calls in 8 answers"

    def check_tools_named(self):
        """tool_choice by name: that tool only"""
        choice = {"type": "function", "function": {"name": "book_trip"}}
        for seed in range(4):
            answer = self.chat(tools=TOOLS, tool_choice=choice, max_tokens=LONG, seed=seed)
            self.assert_calls(answer.choices[0], {"book_trip"})

    def check_tools_single(self):
        """parallel_tool_calls=False: one call"""
        for seed in range(4):
            answer = self.chat(
                tools=TOOLS, tool_choice="required", max_tokens=LONG, seed=seed, parallel_tool_calls=False
            )
            assert self.assert_calls(answer.choices[0], {"book_trip", "give_up"}) == 1

    def check_tools_stream(self):
        """streamed tool calls equal whole ones, id and name once"""
        for seed in range(4):
            fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": LONG, "seed": seed}
            whole = self.chat(**fields).choices[0].message.tool_calls
            calls = []
            for chunk in self.chat(**fields, stream=True):
                for delta in chunk.choices[0].delta.tool_calls or []:
                    if delta.index == len(calls):
                        assert delta.id and delta.function.name and delta.type == "function", delta
                        calls.append([delta.function.name, ""])
                    else:
                        assert delta.index == len(calls) - 1 and not delta.id, delta
                    calls[-1][1] += delta.function.arguments or ""
            assert calls == [[call.function.name, call.function.arguments] for call in whole], calls

    def check_tools_free(self):
        """tool_choice auto and none"""
        auto = self.chat(tools=TOOLS, tool_choice="auto").choices[0]
        assert auto.finish_reason in ("stop", "length", "tool_calls")
        none = self.chat(tools=TOOLS, tool_choice="none", max_tokens=200).choices[0]
        assert none.message.tool_calls is None and none.finish_reason in ("stop", "length"), none

    def check_tools_cut(self):
        """a call that max_tokens cuts ends as length"""
        for limit in (1, 20, 60):
            fields = {"tools": TOOLS, "tool_choice": "required", "seed": 3, "max_tokens": limit}
            assert self.chat(**fields).choices[0].finish_reason == "length"

    def check_logprobs(self):
        """logprobs, top_logprobs"""
        choice = self.chat(temperature=0, logprobs=True, top_logprobs=3).choices[0]
        entries = choice.logprobs.content
        text = b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace")
        assert text == choice.message.content, (text, choice.message.content)
        for entry in entries:
            tops = [top.logprob for top in entry.top_logprobs]
            assert len(tops) == 3 and tops == sorted(tops, reverse=True), tops
            assert entry.logprob == tops[0] <= 0, "greedy takes the likeliest"
        streamed = []
        for chunk in self.chat(temperature=0, logprobs=True, top_logprobs=3, stream=True):
            streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
        assert streamed == entries
        return f"{len(entries)} tokens"

    def check_json_object(self):
        """response_format json_object"""
        for seed in range(6):
            fields = {"response_format": {"type": "json_object"}, "max_tokens": LONG, "seed": seed}
            choice = self.chat(**fields).choices[0]
            assert choice.finish_reason == "stop", choice
            assert isinstance(json.loads(choice.message.content), dict)

    def check_json_schema(self):
        """response_format json_schema, streamed too"""
        schema = {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema, "strict": True}}
        for seed in range(6):
            fields = {"response_format": form, "max_tokens": LONG, "seed": seed}
            choice = self.chat(**fields).choices[0]
            trip = json.loads(choice.message.content)
            assert set(trip) == {"city", "days"} and trip["city"] in ("Rome", "Oslo"), trip
            assert isinstance(trip["days"], int) and choice.finish_reason == "stop", choice
            chunks = self.chat(**fields, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content

    def check_parse(self):
        """chat.completions.parse with a pydantic model"""
        num_legs = 0
        for seed in range(6):
            answer = self.client.chat.completions.parse(
                model=self.model, messages=QUESTION, response_format=Trip, max_tokens=LONG, seed=seed,
                reasoning_effort="none",
            )
            trip = answer.choices[0].message.parsed
            assert isinstance(trip, Trip), answer
            num_legs += len(trip.legs)
        return f"6 trips, {num_legs} legs"

    def check_json_and_reasoning(self):
        """response_format with reasoning: nothing else is content"""
        form = {"type": "json_object"}
        for seed in range(8):
            # Reasoning is free, and random weights end the turn in it or never.
            answer = self.chat(reasoning_effort="high", response_format=form, max_tokens=300, seed=seed)
            message = answer.choices[0].message
            assert message.reasoning_content and message.content == "", answer.choices[0]

    def check_samples(self):
        """n=4 with a seed: four different, twice the same"""
        fields = {"n": 4, "seed": 7, "temperature": 1, "max_tokens": 24}
        texts = [choice.message.content for choice in self.chat(**fields).choices]
        assert len(set(texts)) == 4, texts
        assert [choice.message.content for choice in self.chat(**fields).choices] == texts
        streamed = [""] * 4
        for chunk in self.chat(**fields, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        assert streamed == texts, (streamed, texts)

    def check_completions(self):
        """completions: text, stream, batch, n"""
        alone = [self.complete(prompt).choices[0].text for prompt in ("one", "two", "three é")]
        batch = self.complete(["one", "two", "three é"])
        assert [choice.text for choice in batch.choices] == alone
        assert [choice.index for choice in batch.choices] == [0, 1, 2]
        stream = self.complete("one", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == alone[0]
        several = self.complete(["one", "two"], n=2, temperature=1, seed=1).choices
        assert len({choice.text for choice in several}) == 4
        ids = self.complete([5, 6, 7], max_tokens=3)
        assert ids.usage.prompt_tokens == 3 and ids.usage.completion_tokens <= 3

    def check_completion_logprobs(self):
        """completions: echo and logprobs"""
        plain = self.complete("hello", max_tokens=8).choices[0].text
        choice = self.complete("hello", max_tokens=8, echo=True, logprobs=2).choices[0]
        assert choice.text == "hello" + plain, choice.text
        logprobs = choice.logprobs
        assert "".join(logprobs.tokens).startswith("hello") and logprobs.token_logprobs[0] is None
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
        assert all(value <= 0 for value in logprobs.token_logprobs[1:])
        assert all(len(tops) in (2, 3) for tops in logprobs.top_logprobs[1:]), logprobs.top_logprobs
        assert logprobs.text_offset[:6] == [0, 1, 2, 3, 4, 5]
        scored = self.complete("hello", max_tokens=0, echo=True, logprobs=0).choices[0]
        assert scored.text == "hello" and len(scored.logprobs.tokens) == 5
        assert scored.logprobs.token_logprobs == logprobs.token_logprobs[:5]

    def check_stop(self):
        """stop strings"""
        text = self.complete("stop", max_tokens=60).choices[0].text
        stop = text[10:13]
        for stream in (False, True):
            answer = self.complete("stop", max_tokens=60, stop=[stop, "never this"], stream=stream)
            chunks = list(answer) if stream else [answer]
            assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
            assert chunks[-1].choices[0].finish_reason == "stop"

    def expect_bad(self, param, code="invalid_request_error", **fields):
        try:
            self.chat(**fields)
        except openai.BadRequestError as error:
            assert error.param == param and error.code == code, (error.param, error.code, error.message)
            assert error.body["type"] == "invalid_request_error" and error.message, error.body
            return
        raise AssertionError(f"{fields} was not refused")

    def check_errors(self):
        """BadRequestError with param and code, NotFoundError"""
        self.expect_bad("temperature", temperature=-1)
        self.expect_bad("top_logprobs", top_logprobs=3)
        self.expect_bad("messages[0].role", messages=[{"role": "wizard", "content": "hi"}])
        self.expect_bad("tool_choice.function.name", tools=TOOLS,
                        tool_choice={"type": "function", "function": {"name": "nope"}})
        self.expect_bad("max_tokens", max_tokens=-1)
        broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wrong"}}}
        self.expect_bad("response_format.json_schema.schema", response_format=broken)
        long = [{"role": "user", "content": "x" * 5000}]
        self.expect_bad("messages", code="context_length_exceeded", messages=long)
        for call in (
            lambda: self.client.chat.completions.create(model="gpt-x", messages=QUESTION),
            lambda: self.client.models.retrieve("gpt-x"),
        ):
            try:
                call()
                raise AssertionError("an unknown model was accepted")
            except openai.NotFoundError as error:
                assert error.code == "model_not_found", error.body

    def check_ignored_fields(self):
        """fields that hosted services know are accepted, or refused by name"""
        answer = self.chat(
            store=True, metadata={"a": "b"}, service_tier="auto", user="someone", modalities=["text"],
            prompt_cache_key="k", safety_identifier="s", verbosity="low", max_completion_tokens=2,
            frequency_penalty=0.5, presence_penalty=-1, logit_bias={"5": 10}, stop=None, temperature=None,
        )
        assert answer.usage.completion_tokens <= 2 and answer._request_id, answer
        self.expect_bad("functions", functions=[{"name": "f", "parameters": {}}])
        self.expect_bad("modalities", modalities=["text", "audio"])
        allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "give_up"}}]}
        self.expect_bad("tool_choice.type", tools=TOOLS,
                        tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
        picture = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
        self.expect_bad("messages[0].content[0]", messages=[{"role": "user", "content": [picture]}])
        for prompt in ("", []):
            try:
                self.complete(prompt)
                raise AssertionError("an empty prompt was accepted")
            except openai.BadRequestError as error:
                assert error.param == "prompt", error.body

    def check_concurrent_streams(self):
        """32 concurrent streams of the async client"""

        async def one(client, i):
            stream = await client.chat.completions.create(
                model=self.model, messages=[{"role": "user", "content": f"question {i}"}],
                max_tokens=60, temperature=0, stream=True,
            )
            return "".join([getattr(c.choices[0].delta, "reasoning_content", None) or c.choices[0].delta.content or ""
                            async for c in stream if c.choices])

        async def run(indices):
            async with AsyncOpenAI(base_url=self.server.url + "/v1", api_key="x", max_retries=0) as client:
                return await asyncio.gather(*(one(client, i) for i in indices))

        alone = [asyncio.run(run([i]))[0] for i in range(32)]
        assert asyncio.run(run(range(32))) == alone
        assert len(set(alone)) > 1

    def check_cancellation(self):
        """streams and whole answers dropped midway free everything"""
        fields = {"extra_body": {"ignore_eos": True}, "max_tokens": 3500}
        streams = []
        for _ in range(16):
            stream = self.chat(stream=True, **fields)
            for _ in range(3):
                next(stream)
            streams.append(stream)
        assert self.server.loads()["num_running_reqs"] > 0
        for stream in streams:
            stream.close()
        assert_idle(self.server.wait_until_idle(5))
        try:  # a whole answer whose client loses patience
            self.client.with_options(timeout=0.3).chat.completions.create(
                model=self.model, messages=QUESTION, n=32, **fields)
            raise AssertionError("expected a time-out")
        except openai.APITimeoutError:
            assert_idle(self.server.wait_until_idle(5))
        assert self.server.metric("sglang:num_running_reqs") == 0


MIXED_PROMPTS = ["", "the same beginning of many prompts, longer than a page and a checkpoint: " * 4]


def greedy_requests():
    """Prompts of many lengths, half of them with a common beginning."""
    return [MIXED_PROMPTS[i % 2] + f"request {i} " + "x" * (7 * i % 190) for i in range(64)]


def answer_greedy(server, others=0):
    """Greedy texts of the requests, all at once, mixed with `others` sampled requests."""

    async def run():
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
            model = (await client.models.list()).data[0].id

            async def one(prompt, **fields):
                answer = await client.completions.create(
                    model=model, prompt=prompt, max_tokens=40, extra_body={"ignore_eos": True}, **fields)
                return answer.choices[0].text

            greedy = [one(prompt, temperature=0) for prompt in greedy_requests()]
            sampled = [one(f"other {i}", temperature=1, presence_penalty=0.5, n=2) for i in range(others)]
            return (await asyncio.gather(*greedy, *sampled))[: len(greedy)]

    return asyncio.run(run())


def check_equal_answers(tandem, model, server):
    """64 greedy answers: alone, mixed, with a warm cache, without cache, in small chunks"""
    client = OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
    name = client.models.list().data[0].id
    alone = [
        client.completions.create(model=name, prompt=prompt, max_tokens=40, temperature=0,
                                  extra_body={"ignore_eos": True}).choices[0].text
        for prompt in greedy_requests()
    ]
    assert len(set(alone)) > 32, "hardly any answer differs from the others"
    assert answer_greedy(server) == alone, "64 at once, warm cache"
    assert answer_greedy(server, others=16) == alone, "64 at once among sampled ones"
    hits = server.loads()["prefix_hits"]
    assert hits > 0, "the prefix cache was never hit"
    for options in (["--no-prefix-cache"], ["--max-batch-tokens", "64"], ["--max-running", "3"]):
        with Server(tandem, model, *options) as other:
            assert answer_greedy(other) == alone, options
            assert other.loads()["prefix_hits"] == 0 or "--no-prefix-cache" not in options
    return f"{hits} cache hits"


def check_api_key(tandem, model):
    """AuthenticationError without the key, an answer with it"""
    with Server(tandem, model, "--api-key", "sesame") as server:
        for key in ("wrong", "sesam", "sesame2"):
            try:
                OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0).models.list()
                raise AssertionError(f"{key} was accepted")
            except openai.AuthenticationError as error:
                assert error.code == "invalid_api_key", error.body
        right = OpenAI(base_url=server.url + "/v1", api_key="sesame", max_retries=0)
        name = right.models.list().data[0].id
        assert right.chat.completions.create(model=name, messages=QUESTION, max_tokens=4).choices


def check_drain(tandem, model):
    """SIGTERM: what runs is finished, exit code 0"""
    with Server(tandem, model) as server:
        client = OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
        name = client.models.list().data[0].id
        stream = client.completions.create(model=name, prompt="go", max_tokens=1500, stream=True,
                                           extra_body={"ignore_eos": True}, stream_options={"include_usage": True})
        next(stream)
        server.process.terminate()
        time.sleep(0.05)
        chunks = list(stream)
        assert chunks[-1].usage.completion_tokens == 1500, chunks[-1]
        assert server.process.wait(timeout=30) == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tandem", default=DEFAULT_TANDEM, type=find_tandem)
    parser.add_argument("--preset", default="k3-nano")
    options = parser.parse_args()
    tandem = find_tandem(options.tandem)
    checks = Checks()
    print(f"openai {openai.__version__}, Python {sys.version.split()[0]}, {options.preset} with random weights")
    with model_folder(tandem, options.preset) as model:
        with Server(tandem, model) as server:
            client = OpenaiClient(server)
            for name in dir(client):
                if name.startswith("check_"):
                    method = getattr(client, name)
                    checks.run(method.__doc__, method)
            checks.run(check_equal_answers.__doc__, check_equal_answers, tandem, model, server)
            checks.run("idle at the end", lambda: assert_idle(server.wait_until_idle(5)))
        checks.run(check_api_key.__doc__, check_api_key, tandem, model)
        checks.run(check_drain.__doc__, check_drain, tandem, model)
    return checks.summary()


if __name__ == "__main__":
    sys.exit(main())
