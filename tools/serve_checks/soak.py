"""Holds connections and streams for a while, with trouble among them (see ../serve_soak)."""

import argparse
import array
import asyncio
import json
import random
import resource
import socket
import sys
import time

from common import Checks, DEFAULT_TANDEM, Server, assert_idle, find_tandem, model_folder
from victim import STAGES

REFERENCE_TOKENS = 500
UNREAD_TOKENS = 3000  # of each of four samples; together more than the kernel takes in
WRITE_SECONDS = 30  # the server's limit for a client that does not read
MAX_BODY_BYTES = 1 << 20
HEADER_SECONDS = 10  # the server's limits
IDLE_SECONDS = 60
MAX_ITL_FACTOR = 1.5  # what slow readers may do to the median of others
MAX_GROWTH_MIB = 8


def completion(prompt, **fields):
    return {"prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | fields


def request_bytes(path, body, more=""):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{more}Content-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def read_response(reader):
    """Status and body of an answer with Content-Length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = int(next(line for line in head.lower().split("\r\n") if line.startswith("content-length:")).split(":")[1])
    return int(head.split()[1]), await reader.readexactly(length)


def server_socket(server_port, client_port):
    """State (01: established) and unsent bytes of the server's end of a connection, by the kernel."""
    local, remote = f"0100007F:{server_port:04X}", f"0100007F:{client_port:04X}"
    with open("/proc/net/tcp") as table:
        for line in table:
            fields = line.split()
            if fields[1] == local and fields[2] == remote:
                return fields[3], int(fields[4].split(":")[0], 16)
    return None, 0


async def post(port, path, body):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes(path, body))
    status, answer = await read_response(reader)
    writer.close()
    return status, json.loads(answer)


class Reader:
    """Server-sent events out of a chunked answer."""

    def __init__(self, reader):
        self.reader = reader
        self.events = []

    async def next_event(self):
        while not self.events:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            data = await self.reader.readexactly(size + 2)
            # A chunk holds whole events; otherwise the check fails, which is well.
            self.events = [line[6:] for line in data[:-2].decode().split("\n\n") if line.startswith("data: ")]
        return self.events.pop(0)


class Soak:
    def __init__(self, server, options):
        self.server = server
        self.options = options
        self.random = random.Random(1)
        self.end = 0
        self.phase = 0  # odd: some read slowly
        self.num_slow = 0
        self.references = []
        # By whether slow readers were there; every eighth, for they are millions.
        self.itl_ms = {False: array.array("f"), True: array.array("f")}
        self.counts = {}
        self.problems = []
        self.rss = []
        self.idle_lost = 0

    def count(self, what, by=1):
        self.counts[what] = self.counts.get(what, 0) + by

    def problem(self, text):
        if len(self.problems) < 20:
            print("problem:", text[:500], flush=True)
        self.problems.append(text)

    def is_over(self):
        return time.monotonic() >= self.end

    async def make_references(self):
        prompts = [f"stream {i}: " + "abc " * (i * 3) for i in range(16)]
        for prompt in prompts:
            _, answer = await post(self.server.port, "/v1/completions", completion(prompt, max_tokens=REFERENCE_TOKENS))
            ids = answer["choices"][0]["token_ids"]
            assert len(ids) == REFERENCE_TOKENS, len(ids)
            self.references.append((prompt, ids))

    async def stream_once(self, reader, writer, prompt, expected, slow_bytes_per_s=0):
        """One stream; its tokens must be `expected`, and usage must count them."""
        body = completion(prompt, max_tokens=len(expected), stream=True, stream_options={"include_usage": True})
        writer.write(request_bytes("/v1/completions", body))
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head:
            raise AssertionError(f"a stream was refused: {head!r}")
        ids, usage, last, finishes = [], None, time.monotonic(), 0
        events = Reader(reader)
        while (event := await events.next_event()) != "[DONE]":
            chunk = json.loads(event)
            if "error" in chunk:
                raise AssertionError(f"a stream failed: {event}")
            usage = chunk["usage"] or usage
            for choice in chunk["choices"]:
                ids += choice.get("token_ids", [])
                finishes += choice["finish_reason"] is not None
            now = time.monotonic()
            if slow_bytes_per_s:
                await asyncio.sleep(len(event) / slow_bytes_per_s)
            elif len(ids) % 8 == 2 and chunk["choices"]:
                self.itl_ms[self.num_slow > 0].append(1000 * (now - last))
            last = now
        if await reader.readuntil(b"0\r\n\r\n") != b"0\r\n\r\n":
            raise AssertionError("bytes after the end of a stream")
        if ids != expected:
            at = next((i for i, (a, b) in enumerate(zip(ids, expected)) if a != b), min(len(ids), len(expected)))
            raise AssertionError(f"tokens differ at {at} of {len(expected)}; {len(ids)} came")
        if usage["completion_tokens"] != len(ids) or finishes != 1:
            raise AssertionError(f"{usage}, {len(ids)} tokens, {finishes} finishes")
        self.count("tokens", len(ids))

    async def streams(self):
        """Streams one after the other over one connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        while not self.is_over():
            prompt, ids = self.random.choice(self.references)
            try:
                await self.stream_once(reader, writer, prompt, ids[: self.random.randint(20, REFERENCE_TOKENS)])
                self.count("streams")
            except (AssertionError, OSError, asyncio.IncompleteReadError, ValueError) as error:
                self.problem(f"stream: {type(error).__name__}: {error}")
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.close()

    async def slow_reads(self):
        """A client that takes what comes slowly by phases; it loses nothing."""
        while not self.is_over():
            is_slow = self.phase % 2 == 1
            self.num_slow += is_slow
            connection = self.connect_with_small_buffer() if is_slow else None
            reader, writer = (
                await asyncio.open_connection(sock=connection, limit=4096) if is_slow
                else await asyncio.open_connection("127.0.0.1", self.server.port))
            prompt, ids = self.random.choice(self.references)
            try:
                await self.stream_once(reader, writer, prompt, ids[:200], slow_bytes_per_s=10000 if is_slow else 0)
                self.count("slow streams", is_slow)
            except (AssertionError, OSError, asyncio.IncompleteReadError, ValueError) as error:
                self.problem(f"slow reader: {type(error).__name__}: {error}")
            writer.close()
            self.num_slow -= is_slow

    async def never_reads(self):
        """A client that asks for much and, by phases, reads nothing: the server must cut it."""
        body = completion("never read", max_tokens=UNREAD_TOKENS, stream=True, logprobs=10, n=4)
        request = request_bytes("/v1/completions", body)
        last_phase = 0
        while not self.is_over():
            phase = self.phase
            if phase % 2 == 0 or phase == last_phase:
                await self.read_at_once(request)
                continue
            last_phase = phase
            self.num_slow += 1
            connection = self.connect_with_small_buffer()
            connection.sendall(request)
            is_cut = await self.until_cut(connection.getsockname()[1])
            if is_cut is False:
                self.problem(f"a client that reads nothing was not cut within {WRITE_SECONDS + 10} s")
            self.count("unread streams cut", is_cut is True)
            connection.close()
            self.num_slow -= 1

    async def until_cut(self, client_port):
        """Whether the server closed its side; None when time was up before that could be said."""
        stuck_s, last_queued = 0, 0
        while not self.is_over():
            await asyncio.sleep(1)
            state, queued = server_socket(self.server.port, client_port)
            if state != "01":  # no longer ESTABLISHED
                return True
            stuck_s = stuck_s + 1 if queued == last_queued > 0 else 0
            last_queued = queued
            if stuck_s > WRITE_SECONDS + 10:
                return False
        return None

    async def read_at_once(self, request):
        """The same load in the other phases, so that only the reading differs."""
        phase = self.phase
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(request)
        tail = b""
        while b"[DONE]" not in tail and self.phase == phase and not self.is_over():
            tail = (tail + await reader.read(1 << 16))[-20:]
        writer.close()

    def connect_with_small_buffer(self):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", self.server.port))
        return connection

    async def idles(self):
        """A keep-alive connection with a request every 45 s."""
        await asyncio.sleep(self.random.random() * 5)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            while not self.is_over():
                writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                status, _ = await read_response(reader)
                if status != 200:
                    self.problem(f"/health answered {status}")
                self.count("requests on idle connections")
                await asyncio.sleep(min(45, max(0, self.end - time.monotonic())))
        except (OSError, asyncio.IncompleteReadError) as error:
            self.idle_lost += 1
            self.problem(f"idle connection: {type(error).__name__}: {error}")
        writer.close()

    async def expect_cut(self, what, after_s, send):
        """A connection that the server must close about `after_s` after it began."""
        while time.monotonic() + after_s + 10 < self.end:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
            start = time.monotonic()
            feeding = asyncio.create_task(send(writer))
            try:
                await asyncio.wait_for(reader.read(-1), after_s + 8)
                seconds = time.monotonic() - start
                if seconds < after_s - 1:
                    self.problem(f"{what} was cut after {seconds:.1f} s already")
                self.count(f"{what} cut")
            except asyncio.TimeoutError:
                self.problem(f"{what} was not cut within {after_s + 8} s")
            except OSError:
                self.count(f"{what} cut")
            feeding.cancel()
            writer.close()

    @staticmethod
    async def send_headers_slowly(writer):
        writer.write(b"GET /health HTTP/1.1\r\n")
        for i in range(100):
            writer.write(f"X-{i}: y\r\n".encode())
            await asyncio.sleep(0.7)

    @staticmethod
    async def send_nothing(writer):
        pass

    async def kills(self):
        """Client processes that are killed at every stage."""
        while not self.is_over():
            for stage in STAGES:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "tools/serve_checks/victim.py", str(self.server.port), stage,
                    stdout=asyncio.subprocess.PIPE)
                line = await process.stdout.readline()
                if line != b"ready\n":
                    self.problem(f"the victim of stage {stage} ended by itself")
                    continue
                process.kill()
                await process.wait()
                self.count("clients killed")
            await asyncio.sleep(2)

    MALFORMED = [
        (b"nonsense\r\n\r\n", 400),
        (b"\x00\x01\x02\xff\xfe\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /health HTTP/9.9\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /" + b"x" * 70000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(200)) + b"\r\n", 431),
        (b"POST /generate HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 400),
        (b"POST /generate HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
        (b"POST /generate HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n", 413),
        (b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", 400),
        (b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n", 413),
        (b"POST /generate HTTP/1.1\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcde", 400),
        (b"DELETE /v1/models HTTP/1.1\r\n\r\n", 405),
        (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"GET /v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd HTTP/1.1\r\n\r\n", 404),
    ]
    MALFORMED_BODIES = [
        b"", b"{", b"[]", b"null", b"{}", b"{} {}", b'{"prompt": "a", "prompt": "b"}', b"\xff\xfe\x00",
        b'{"prompt": "\xc3\x28"}', b'{"prompt": "\\ud800"}', b'{"prompt": "a", "max_tokens": NaN}',
        b'{"prompt": "a", "max_tokens": 1e999}', b'{"prompt": "a", "max_tokens": "many"}',
        b'{"prompt": "a", "n": 100000}', b'{"prompt": [99999999]}', b'{"prompt": [-1]}', b'{"prompt": [1, "a"]}',
        b'{"prompt": "a", "temperature": -1}', b'{"prompt": "a", "top_p": 5}', b'{"prompt": "a", "stop": [1]}',
        b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}", b'{"prompt": "' + b"x" * 100000 + b'"}',
    ]

    async def sends_malformed(self):
        bodies = [(b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                   % (len(body), body), 400) for body in self.MALFORMED_BODIES]
        huge = b"x" * 65536
        chunk = b"%x\r\n%b\r\n" % (len(huge), huge)
        head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        bodies.append((head + chunk * (2 * MAX_BODY_BYTES // len(huge)), 413))
        wrong = b"POST /v1/completions HTTP/1.1\r\nContent-Type: text/xml\r\nContent-Length: 2\r\n\r\n{}"
        bodies.append((wrong, 415))
        while not self.is_over():
            for message, expected in self.MALFORMED + bodies:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
                try:
                    writer.write(message)
                    status, body = await asyncio.wait_for(read_response(reader), 15)
                    error = json.loads(body)["error"]
                    if status != expected or not error["message"] or not error["code"]:
                        self.problem(f"{message[:80]!r}: {status} {body[:200]!r}, expected {expected}")
                    self.count("malformed requests refused")
                except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, KeyError, ValueError) as error:
                    self.problem(f"{message[:80]!r}: {type(error).__name__}: {error}")
                writer.close()
                await asyncio.sleep(0.05)
            await asyncio.sleep(2)

    async def watches(self):
        """Phases, memory, and whether the load is what was asked for."""
        start = time.monotonic()
        num_looks = 0
        running = []
        phase_s = max(45.0, 60 * self.options.minutes / 6)
        while not self.is_over():
            await asyncio.sleep(1)
            seconds = time.monotonic() - start
            self.phase = int(seconds / phase_s)
            loads = await asyncio.get_running_loop().run_in_executor(None, self.server.loads)
            num_looks += 1
            if seconds > 10 and time.monotonic() < self.end - 1:
                running.append(loads["num_running_reqs"])
            if num_looks % 10 == 0:
                self.rss.append(self.server.rss_mib())
                print(f"{seconds:5.0f} s: {loads['num_running_reqs']} + {loads['num_waiting_reqs']} requests, "
                      f"{self.server.num_open_files()} files, {self.rss[-1]:.1f} MiB, "
                      f"{self.counts.get('tokens', 0)} tokens, {len(self.problems)} problems", flush=True)
        self.running = running

    async def run(self):
        await self.make_references()
        self.end = time.monotonic() + 60 * self.options.minutes
        tasks = [self.idles() for _ in range(self.options.idle)]
        tasks += [self.streams() for _ in range(self.options.streams)]
        tasks += [self.slow_reads() for _ in range(8)] + [self.never_reads() for _ in range(2)]
        tasks += [self.expect_cut("slow headers", HEADER_SECONDS, self.send_headers_slowly) for _ in range(4)]
        tasks += [self.expect_cut("silent connections", IDLE_SECONDS, self.send_nothing) for _ in range(4)]
        tasks += [self.kills(), self.sends_malformed(), self.watches()]
        await asyncio.gather(*tasks)


def percentiles(values):
    ordered = sorted(values)
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * p))] for p in (0.5, 0.9, 0.99)] if ordered else [0] * 3
    return f"p50 {at[0]:.1f}, p90 {at[1]:.1f}, p99 {at[2]:.1f}, max {ordered[-1] if ordered else 0:.0f} ms", at[0]


class Verdict:
    def __init__(self, soak, server, files_before):
        self.soak = soak
        self.server = server
        self.files_before = files_before

    def no_problems(self):
        assert not self.soak.problems, f"{len(self.soak.problems)}, the first: {self.soak.problems[0]}"
        return f"{self.soak.counts['streams']} streams, {self.soak.counts['tokens']} tokens, each as the reference"

    def load_was_held(self):
        options, running = self.soak.options, self.soak.running
        mean = sum(running) / len(running)
        # A stream that has just ended begins anew after a way to the client and back.
        assert self.soak.idle_lost == 0 and mean >= 0.95 * options.streams, f"{mean:.1f} in the mean"
        return f"{options.idle} idle; running at once: {mean:.0f} in the mean, {min(running)} to {max(running)}"

    def slow_readers(self):
        (without, a), (with_slow, b) = (percentiles(self.soak.itl_ms[phase]) for phase in (False, True))
        print(f"        ITL of others, all read at once:  {without}")
        print(f"        ITL of others beside slow ones:   {with_slow}")
        assert a > 0 and b <= MAX_ITL_FACTOR * a, "slow readers delay others"

    def memory(self):
        # The first samples are warm-up: caches fill.
        samples = self.soak.rss[len(self.soak.rss) // 6 :]
        first, middle, last = samples[0], samples[len(samples) // 2], samples[-1]
        note = f"RSS after warm-up {first:.1f}, in the middle {middle:.1f}, at the end {last:.1f} MiB"
        assert last <= middle + MAX_GROWTH_MIB, note
        return note

    def all_free(self):
        assert_idle(self.server.wait_until_idle(15))
        for name in ("sglang:mamba_usage", "sglang:kv_used_tokens", "sglang:num_running_reqs"):
            assert self.server.metric(name) == 0, name
        self.server.get("/flush_cache")
        assert self.server.loads()["num_cached_tokens"] == 0
        total = self.server.metric("sglang:max_total_num_tokens")
        assert self.server.metric("sglang:kv_available_tokens") == total, "pages are missing"
        return f"{total:.0f} tokens of cache free, {self.server.metric('sglang:num_retracted_requests_total'):.0f} preemptions"

    def files_closed(self):
        end = time.monotonic() + 10
        while (files := self.server.num_open_files()) > self.files_before + 2 and time.monotonic() < end:
            time.sleep(0.2)
        assert files <= self.files_before + 2, f"{self.files_before} before, {files} now"
        return f"{files} open files"

    def ends(self):
        """A stream that runs at SIGTERM is finished."""

        async def stream_over_the_end():
            prompt, ids = self.soak.references[0]
            reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
            streaming = asyncio.create_task(self.soak.stream_once(reader, writer, prompt, ids))
            await asyncio.sleep(0.03)
            was_running = not streaming.done()
            self.server.process.terminate()
            await streaming
            writer.close()
            return was_running

        was_running = asyncio.run(stream_over_the_end())
        assert self.server.process.wait(timeout=40) == 0, "exit code"
        return "exit code 0" + ("" if was_running else " (the stream had ended before the signal)")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--preset", default="k3-nano")
    parser.add_argument("--tandem", default=DEFAULT_TANDEM)
    options = parser.parse_args()
    tandem = find_tandem(options.tandem)
    needed = options.idle + options.streams + 200
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < needed:
        sys.exit(f"{needed} open files are needed, the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    checks = Checks()
    with model_folder(tandem, options.preset) as model:
        limits = ["--max-running", options.streams + 16, "--max-queued", 2048, "--cache-gib", "0.06",
                  "--max-body-bytes", MAX_BODY_BYTES]
        with Server(tandem, model, *limits) as server:
            files_before = server.num_open_files()
            soak = Soak(server, options)
            print(f"{options.idle} idle connections, {options.streams} streams, {options.minutes:g} minutes", flush=True)
            asyncio.run(soak.run())
            print(", ".join(f"{what}: {count}" for what, count in sorted(soak.counts.items())))
            verdict = Verdict(soak, server, files_before)
            checks.run("no token lost or doubled, all as expected", verdict.no_problems)
            checks.run("the load was held", verdict.load_was_held)
            checks.run("a slow reader does not delay others", verdict.slow_readers)
            checks.run("memory is flat", verdict.memory)
            checks.run("pages and slots back to free", verdict.all_free)
            checks.run("connections closed", verdict.files_closed)
            checks.run("SIGTERM: the running stream is finished", verdict.ends)
    return checks.summary()


if __name__ == "__main__":
    sys.exit(main())
