"""What the checks of `tandem serve` share: a model, a server process, a table of results."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
DEFAULT_TANDEM = REPOSITORY / "build/cpu-release/src/cli/tandem"


def write_tokenizer(path):
    """ASCII, some characters of two and three bytes, and the markers of Kimi K3's chat format."""
    tokens = ["\n", *map(chr, range(32, 127)), "é", "ü", "日", "本"]
    special = ["<unk>", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"]
    spec = {"type": "char", "tokens": tokens, "special": special, "stop": special[-1:]}
    path.write_text(json.dumps(spec))


@contextlib.contextmanager
def model_folder(tandem, preset):
    """A folder with a checkpoint of random weights; it answers gibberish, in the right form."""
    with tempfile.TemporaryDirectory(prefix="tandem-check-") as folder:
        tokenizer = pathlib.Path(folder) / "tokenizer.json"
        write_tokenizer(tokenizer)
        model = pathlib.Path(folder) / preset
        command = [tandem, "init", preset, model, "--tokenizer", tokenizer]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        yield model


class Server:
    """`tandem serve` on a free port of the loopback interface, ended with its context."""

    def __init__(self, tandem, model, *options):
        command = [tandem, "serve", "--model", model, "--port", "0", *options]
        self.started = time.monotonic()
        self.process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            if found := re.search(r" at (http://127\.0\.0\.1:(\d+))/", line):
                self.url = found[1]
                self.port = int(found[2])
                self.seconds_to_start = time.monotonic() - self.started
                return
        raise RuntimeError(f"the server ended with {self.process.wait()} before it was ready")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.is_alive():
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def is_alive(self):
        return self.process.poll() is None

    def rss_mib(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024

    def num_open_files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return response.read().decode()

    def loads(self):
        return json.loads(self.get("/v1/loads"))

    def metric(self, name):
        """The sum over the lines of a metric."""
        lines = self.get("/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(name + r"[{ ]", line))

    def wait_until_idle(self, seconds):
        """The last /v1/loads; nothing runs, waits or holds cache by then, or time is up."""
        end = time.monotonic() + seconds
        while True:
            loads = self.loads()
            busy = loads["num_reqs"] + loads["num_running_reqs"] + loads["num_waiting_reqs"]
            if busy + loads["num_tokens"] == 0 or time.monotonic() > end:
                return loads
            time.sleep(0.05)

    def end(self, seconds):
        """The exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=seconds)


def assert_idle(loads):
    for key in ("num_reqs", "num_running_reqs", "num_waiting_reqs", "num_tokens"):
        assert loads[key] == 0, f"{key} is {loads[key]}: {loads}"


class Checks:
    """Runs functions that assert, and prints a line for each."""

    def __init__(self):
        self.num_passed = 0
        self.failed = []

    def run(self, name, function, *arguments):
        start = time.monotonic()
        try:
            note = function(*arguments) or ""
            self.num_passed += 1
            result = "ok"
        except Exception as error:  # a failed check is a result, whatever failed
            place = traceback.extract_tb(error.__traceback__)[-1]
            note = f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"
            self.failed.append(name)
            result = "FAILED"
        print(f"{result:6}  {name:52}  {time.monotonic() - start:6.1f} s  {str(note)[:600]}", flush=True)

    def summary(self):
        """The exit code."""
        for name in self.failed:
            print(f"failed: {name}")
        print(f"{self.num_passed} passed, {len(self.failed)} failed")
        return 1 if self.failed else 0


def find_tandem(path):
    if not os.access(path, os.X_OK):
        sys.exit(f"{path} is not a program: build it first, or name it with --tandem")
    return path
