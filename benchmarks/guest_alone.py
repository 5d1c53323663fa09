"""Compares the guests of two commits over their sockets, in turns: `python -m benchmarks.guest_alone --base COMMIT`.

Without daemon, gRPC and client, so that a change of some microseconds in the guest shows. Each side is a process of its
own (this file, run in the sources of that commit), which starts guests in bubblewrap and measures when it is asked.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from executor_api.values import encode
from executor_server.backends.guest_archive import pack_guest
from executor_server.guest.supervisor.usage import process_cpu_s
from executor_server.guest.wire import messages
from executor_server.guest.wire.frames import PROTOCOL_VERSION, Frame, FrameDecoder
from executor_server.guest.wire.paths import GUEST_BOOT, GUEST_PATH
from executor_server.guest.wire.schema import Message
from executor_server.guest.wire.schema import message_of as read_message
from executor_server.guest.wire.sequenced import Sequenced
from executor_server.guest.wire.tokens import CHAIN_LENGTH, chained

_REPOSITORY = Path(__file__).parents[1]
_ANSWER_TIMEOUT_S = 60.0
_RULES = {
    "authorized": ["*"],
    "denied": [],
    "refused": ["foreign_modules"],
    "session_operations": 2**53,
    "shipped_tools": [],
}
_LINES = "for number in range(1000):\n    print('line', number)"
_LIMITS: Any = {"wall_time_s": 60.0, "cpu_time_s": 60.0, "operations": 10**7, "output_bytes": 2**30}
_FLOOD = "for number in range(1000):\n    print('x' * 100_000)"
_BATCH = 50  # executions in a turn: less than a tenth of a second
# Seconds from one execution to the next, in which daemon and client would work: what the guest does after its result
# costs no client anything.
_PAUSE_S = 0.0005
_CALLS = 200  # as many calls of a host tool in one execution as in `make bench`
_TOOL = {"name": "echo", "description": "", "parameters": ["value"], "final": False}
_CALLING = f"for number in range({_CALLS}):\n    echo(number)"
_ANSWER = encode(1)


class Guest:
    """A guest in bubblewrap, and the daemon's end of its channel, blocking."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, secret: bytes) -> None:
        self._process = process
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_ANSWER_TIMEOUT_S)
        self._socket.connect(address)
        self._decoder = FrameDecoder()
        self._window = Sequenced()
        self._frames: list[Frame] = []
        self._count = 0
        self._received = 0.0  # when the last bytes came
        hello = messages.Hello(
            token=chained(secret, CHAIN_LENGTH - 1).hex(), protocol=PROTOCOL_VERSION, daemon="bench", last_seq=0
        )
        self._socket.sendall(self._window.unnumbered(hello.kind, hello.head()))
        self._next()
        rules = json.dumps(_RULES).encode()
        self._send(messages.Configure(op=1, settings=len(rules), env=0), rules)
        tools = json.dumps([_TOOL]).encode()
        self._send(messages.RegisterTools(op=2, listed=len(tools)), tools)
        for _ in range(2):
            while not isinstance(read_message(self._next()), messages.Done):
                pass

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _send(self, message: Message, body: bytes = b"") -> float:
        """Returns when it began to send what it had encoded."""
        self._window.send(message.kind, message.head(), body)
        frame = self._window.next_frame()
        assert frame is not None
        data, began = frame.prefix + frame.body, time.perf_counter()
        self._socket.sendall(data)
        return began

    def _next(self) -> Frame:
        while not self._frames:
            data = self._socket.recv(1 << 20)
            self._received = time.perf_counter()
            assert data, "the guest has hung up"
            self._frames = self._decoder.feed(data)
            if self._window.note_received(len(data)):
                self._socket.sendall(self._window.unnumbered(messages.Ack.kind, {}))
        frame = self._frames.pop(0)
        self._window.acknowledge(frame.ack)
        if frame.seq:
            self._window.accept(frame.seq)
        return frame

    def execute(self, source: str) -> tuple[float, float]:
        """Returns the seconds until the first frame of the execution came, and until its result did.

        Encoding and decoding here are not measured.
        """
        self._count += 1
        execution = messages.Execute(id=f"e{self._count}", mode="trailing_expression", asked={}, policy="", **_LIMITS)
        began = self._send(execution, source.encode())
        first_s = 0.0
        while True:
            frame = self._next()
            first_s = first_s or self._received - began
            message = read_message(frame)
            if isinstance(message, messages.ToolCall):
                self._send(messages.ToolResult(id=message.id, call=message.call, ok=True), _ANSWER)
            if isinstance(message, messages.Result):
                assert message.outcome == "succeeded", frame.body
                return first_s, self._received - began

    def pids(self) -> dict[str, int]:
        """Returns bubblewrap and each process below it, by its place in the tree."""
        found: dict[str, int] = {}
        pending = [(self._process.pid, "bwrap")]
        while pending:
            pid, name = pending.pop()
            found[name] = pid
            children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            pending += [(child, f"{name}.{number}") for number, child in enumerate(children)]
        return found

    def pss_bytes(self) -> dict[str, int]:
        """Returns the proportional set size of each process."""
        rollups = {name: Path(f"/proc/{pid}/smaps_rollup").read_text() for name, pid in self.pids().items()}
        return {name: 1024 * int(rollup.split("\nPss:")[1].split()[0]) for name, rollup in rollups.items()}

    def cpu_s(self) -> dict[str, float]:
        """Returns the CPU seconds of the supervisor and the interpreter; a checker is replaced now and then."""
        pids = self.pids()
        return {"supervisor": process_cpu_s(pids["bwrap.0"]), "interpreter": process_cpu_s(pids["bwrap.0.0"])}


@contextmanager
def running_guest(directory: Path, python: str) -> Iterator[Guest]:
    archive = pack_guest(directory)
    secret, name = secrets.token_bytes(32), secrets.token_hex(4)
    workspace = directory / f"workspace-{name}"
    workspace.mkdir()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / name))
    listener.listen(8)
    config = {
        "listen_fd": listener.fileno(),
        "token_hash": chained(secret, CHAIN_LENGTH).hex(),
        "workspace": str(workspace),
        "orphan_time_s": 600,
        "memory_bytes": 2**30,
        "processes": 0,
        "watch_memory": False,
        "preload": [],
    }
    command = ["bwrap", "--unshare-pid", "--as-pid-1", "--die-with-parent", "--dev-bind", "/", "/", "--proc", "/proc"]
    command += ["--tmpfs", "/run", "--ro-bind", str(archive.path), GUEST_PATH]
    command += ["--", python, "-I", "-S", "-c", GUEST_BOOT, json.dumps(config), "-1"]
    process = subprocess.Popen(command, pass_fds=(listener.fileno(),))
    listener.close()
    guest = Guest(process, str(directory / name), secret)
    try:
        yield guest
    finally:
        guest.close()


def _batch(guest: Guest) -> dict[str, list[float]]:
    before = guest.cpu_s()
    took_ms = []
    for _ in range(_BATCH):
        took_ms.append(1000 * guest.execute("1+1")[1])
        ends_at = time.perf_counter() + _PAUSE_S
        while time.perf_counter() < ends_at:
            pass
    spent_s = {name: spent_s - before.get(name, 0.0) for name, spent_s in guest.cpu_s().items()}
    return {"1+1": took_ms, **{f"1+1, CPU of the {name}": [1000 * each / _BATCH] for name, each in spent_s.items()}}


def serve(python: str) -> None:
    """Measures one round for each line read; prints its samples, in milliseconds or MiB, as a line of JSON."""
    with tempfile.TemporaryDirectory(prefix="guest-", dir="/tmp") as parent:
        directory = Path(parent)
        with running_guest(directory, python) as guest:
            _batch(guest)
            for line in sys.stdin:
                what, samples = line.strip(), {}
                if what == "execute":
                    samples = _batch(guest)
                elif what == "lines":
                    first_s, last_s = guest.execute(_LINES)
                    samples.update({"first of 1,000 lines": [1000 * first_s], "last of 1,000 lines": [1000 * last_s]})
                elif what == "calls":
                    samples["a call of a host tool"] = [1000 * guest.execute(_CALLING)[1] / _CALLS]
                elif what == "flood":
                    samples["100 MB of output, ms"] = [1000 * guest.execute(_FLOOD)[1]]
                else:
                    samples = _life(directory, python)
                print(json.dumps(samples), flush=True)


def _life(directory: Path, python: str) -> dict[str, list[float]]:
    began = time.perf_counter()
    with running_guest(directory, python) as guest:
        ready = time.perf_counter()
        guest.execute("1+1")
        used = time.perf_counter()
        sizes = guest.pss_bytes()
    times = {"configured": 1000 * (ready - began), "first 1+1 after it": 1000 * (used - ready)}
    memory = {f"PSS of {name}, MiB": size / 2**20 for name, size in (*sizes.items(), ("all", sum(sizes.values())))}
    return {name: [value] for name, value in {**times, **memory}.items()}


class _Side:
    """The guests of one commit."""

    def __init__(self, sources: Path, python: str) -> None:
        path = os.pathsep.join((str(sources), str(sources / "proto")))
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", "--python", python],
            env={**os.environ, "PYTHONPATH": path},
            cwd=sources,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.samples: dict[str, list[float]] = {}

    def measure(self, what: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        for name, values in json.loads(self._process.stdout.readline()).items():
            self.samples.setdefault(name, []).extend(values)

    def close(self) -> None:
        self._process.communicate(timeout=_ANSWER_TIMEOUT_S)


def compare(base: str, python: str, rounds: int, only: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="guest-base-", dir="/tmp") as folder:
        archived = subprocess.run(["git", "archive", base], cwd=_REPOSITORY, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archived, check=True)
        sides = [_Side(Path(folder), python), _Side(_REPOSITORY, python)]
        for number in range(rounds):
            order = sides if number % 2 else sides[::-1]
            for what in (
                "execute",
                "execute",
                "execute",
                "calls",
                "lines",
                *(("life", "flood") if number % 4 == 0 else ()),
            ):
                for side in order if what in only else ():
                    side.measure(what)
        for side in sides:
            side.close()
    print(f"{'':38}{'base':>18}{'here':>18}   here / base (load {os.getloadavg()[0]:.1f})")
    for name in sides[1].samples:
        before, after = (side.samples.get(name, [0.0]) for side in sides)
        shown = "".join(f"{statistics.median(each):9.3f} ≥{min(each):7.3f}" for each in (before, after))
        ratio = statistics.median(after) / statistics.median(before) if any(before) else float("nan")
        best = min(after) / min(before) if any(before) else float("nan")
        print(f"{name:38}{shown}   {ratio:.2f}, best {best:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="HEAD", help="the commit to compare the working tree with")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the sandboxes")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=["execute", "calls", "lines", "life", "flood"])
    parser.add_argument("--serve", action="store_true", help="be one side: used by this program itself")
    options = parser.parse_args()
    serve(options.python) if options.serve else compare(options.base, options.python, options.rounds, options.only)


if __name__ == "__main__":
    main()
