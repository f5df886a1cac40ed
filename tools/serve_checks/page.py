"""Drives the chat page of `tandem serve` in headless Chromium (see ../serve_page_check)."""

import argparse
import base64
import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

from websockets.sync.client import connect

from common import Checks, DEFAULT_TANDEM, Server, assert_idle, find_tandem, model_folder

MAX_RUNNING = 4  # so that background load queues
MAX_SCREENSHOT_BYTES = 150_000


class Browser:
    """A headless Chromium with one page, spoken to by the DevTools protocol."""

    def __init__(self, profile):
        command = [
            "chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port_file = pathlib.Path(profile) / "DevToolsActivePort"
        end = time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text().count("\n")):
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError("chromium did not start")
            time.sleep(0.1)
        port = port_file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as response:
            page = next(target for target in json.load(response) if target["type"] == "page")
        self.stack = contextlib.ExitStack()
        self.socket = self.stack.enter_context(connect(page["webSocketDebuggerUrl"], max_size=None))
        self.num_commands = 0
        self.events = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(domain + ".enable")
        self.command("Emulation.setDeviceMetricsOverride", width=1180, height=700, deviceScaleFactor=1, mobile=False)

    def close(self):
        self.stack.close()
        self.process.kill()
        self.process.wait()

    def command(self, method, **parameters):
        self.num_commands += 1
        self.socket.send(json.dumps({"id": self.num_commands, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv(timeout=60))
            if message.get("id") == self.num_commands:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def evaluate(self, expression):
        answer = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression, seconds=30):
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"not within {seconds} s: {expression}"
            time.sleep(0.05)
        return value

    def screenshot(self):
        return base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def background_load(server, count):
    """`count` streams that start anew as they end."""
    is_over = threading.Event()

    def stream(i):
        while not is_over.is_set():
            body = {"prompt": f"load {i} " * 8, "max_tokens": 1200, "temperature": 1, "stream": True, "ignore_eos": True}
            request = urllib.request.Request(
                server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                for _ in response:
                    if is_over.is_set():
                        return

    threads = [threading.Thread(target=stream, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


class PageChecks:
    def __init__(self, server, browser):
        self.server = server
        self.browser = browser

    def opens(self):
        self.browser.command("Page.navigate", url=self.server.url + "/")
        self.browser.wait_for("document.readyState === 'complete'")
        model = self.browser.wait_for("(t => t.includes('context') && t)(document.getElementById('model').textContent)")
        return model

    def ask(self, question, max_tokens):
        self.browser.evaluate(f"""
            document.getElementById('temperature').value = '0';
            document.getElementById('max-tokens').value = '{max_tokens}';
            document.getElementById('question').value = {json.dumps(question)};
            document.getElementById('question').focus();""")
        for kind in ("keyDown", "keyUp"):
            self.browser.command("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter",
                                 windowsVirtualKeyCode=13, text="\r" if kind == "keyDown" else "")

    def shown(self):
        return self.browser.evaluate("""
            (box => box && {text: box.querySelector('.text').textContent,
                            reasoning: box.querySelector('.reasoning').textContent,
                            note: box.querySelector('.note').textContent})
            ([...document.querySelectorAll('.message.assistant')].at(-1))""")

    def is_answered(self):
        return self.browser.wait_for("!document.getElementById('send').hidden", 60)

    def chats(self, question, max_tokens):
        self.ask(question, max_tokens)
        self.is_answered()
        shown = self.shown()
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": max_tokens}
        request = urllib.request.Request(
            self.server.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
        message = answer["choices"][0]["message"]
        assert shown["text"] == message["content"], (shown, message)
        assert shown["reasoning"] == (message["reasoning_content"] or ""), (shown, message)
        assert shown["text"] + shown["reasoning"], "nothing was shown"
        assert shown["note"].startswith(f"{answer['usage']['completion_tokens']} tokens"), shown
        return shown["note"]

    def streams_and_stops(self):
        """The text grows while it comes; Stop frees the request."""
        self.browser.evaluate("""document.getElementById('reset').click();
            var plainFetch = window.fetch;  // random weights would end the answer at any place
            window.fetch = (url, options) => plainFetch(url, options.body ?
                {...options, body: options.body.replace('{', '{"ignore_eos":true,')} : options);""")
        with background_load(self.server, MAX_RUNNING - 1):  # so that it does not end at once
            self.ask("A long one, please.", 3000)
            size = "(b => b ? b.textContent.length : 0)([...document.querySelectorAll('.message.assistant')].at(-1))"
            first = self.browser.wait_for(size)
            second = self.browser.wait_for(f"(n => n > {first} && n)({size})")
            self.browser.evaluate("document.getElementById('stop').click()")
            self.is_answered()
            assert self.shown()["note"] == "stopped", self.shown()
        self.browser.evaluate("window.fetch = plainFetch; 0")
        assert_idle(self.server.wait_until_idle(5))
        return f"{first} characters, then {second}; {self.shown()['note']}"

    def charts_move(self):
        """Numbers and drawings follow the load, up and down again."""
        ids = ("throughput", "queue", "cache")
        pictures = "[" + ",".join(f"document.getElementById('{i}').toDataURL()" for i in ids) + "]"
        before = self.browser.evaluate(pictures)
        number = "document.getElementById('%s-now').textContent"
        with background_load(self.server, MAX_RUNNING + 3):
            queue = self.browser.wait_for(f"(t => t === '{MAX_RUNNING} + 3' && t)({number % 'queue'})")
            rate = self.browser.wait_for(f"(t => parseFloat(t) > 1 && t)({number % 'throughput'})")
            cache = self.browser.wait_for(f"(t => parseFloat(t) > 0 && t)({number % 'cache'})")
            time.sleep(4)
            during = self.browser.evaluate(pictures)
        self.browser.wait_for(f"{number % 'queue'} === '0 + 0'")
        self.browser.wait_for(f"parseFloat({number % 'cache'}) === 0")
        time.sleep(2)
        after = self.browser.evaluate(pictures)
        for name, *drawn in zip(ids, before, during, after):
            assert len(set(drawn)) == 3, f"the {name} chart stood still"
        return f"{rate} tokens/s, {queue} requests, cache {cache}"

    def has_no_errors(self):
        bad = [e for e in self.browser.events if e.get("method") == "Runtime.exceptionThrown"
               or e.get("method") == "Log.entryAdded" and e["params"]["entry"]["level"] in ("warning", "error")]
        assert not bad, bad[:3]
        urls = [e["params"]["request"]["url"] for e in self.browser.events
                if e.get("method") == "Network.requestWillBeSent"]
        foreign = [url for url in urls if not url.startswith(self.server.url + "/")]
        assert urls and not foreign, foreign[:3]
        return f"{len(urls)} requests, all to the server"

    def saves_screenshot(self, path):
        picture = self.browser.screenshot()
        assert len(picture) <= MAX_SCREENSHOT_BYTES, f"{len(picture)} bytes"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture)
        return f"{path}, {len(picture)} bytes"


def run(checks, tandem, model, options):
    with (
        Server(tandem, model, "--max-running", MAX_RUNNING) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        contextlib.closing(Browser(profile)) as browser,
    ):
        page = PageChecks(server, browser)
        checks.run("the page opens", page.opens)
        checks.run("the text grows as it comes, Stop frees it", page.streams_and_stops)
        checks.run("throughput, queue and cache move", page.charts_move)
        browser.evaluate("document.getElementById('reset').click()")
        checks.run("a chat shows the API's greedy answer", page.chats, options.question, 160)
        with background_load(server, MAX_RUNNING - 1):
            time.sleep(8)
            checks.run("screenshot", page.saves_screenshot, options.screenshot)
        checks.run("no script errors, no foreign addresses", page.has_no_errors)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tandem", default=DEFAULT_TANDEM)
    parser.add_argument("--model", help="a checkpoint; by default one of random weights is made")
    parser.add_argument("--question", default="What is 2 + 3?")
    parser.add_argument("--screenshot", type=pathlib.Path, default=pathlib.Path("build/serve_checks/page.png"))
    options = parser.parse_args()
    tandem = find_tandem(options.tandem)
    checks = Checks()
    if options.model:
        run(checks, tandem, options.model, options)
    else:
        with model_folder(tandem, "k3-nano") as model:
            run(checks, tandem, model, options)
    return checks.summary()


if __name__ == "__main__":
    sys.exit(main())
