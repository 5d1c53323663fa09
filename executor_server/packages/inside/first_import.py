"""Imports modules for the first time, in a build sandbox with a read-only environment, and packs the bytecode.

Each import runs code of strangers: it may end the process, hang or print for ever. So a child does it; the parent ends
it when it takes too long, and starts another one for the modules that are left.

Lines to the daemon: {"done": n, "total": m} while it works, {"failed": module, "why": text}, {"packed": files}.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MAX_WHY_CHARS = 300
_MAX_CHILDREN = 20
_MAX_ANSWER_BYTES = 65_536
_MAX_MODULES = 300

# It writes one line for each module to the descriptor that it is given: a module's name, and why it failed.
_CHILD = """
import importlib, json, os, site, sys
task = json.loads(sys.argv[1])
sys.dont_write_bytecode = False
sys.pycache_prefix = task["cache"]
before = list(sys.path)
site.addsitedir(task["site"])
added = [entry for entry in sys.path if entry not in before]
sys.path[:] = [entry for entry in before if "site-packages" not in entry and "dist-packages" not in entry] + added + \
    [entry for entry in before if "site-packages" in entry or "dist-packages" in entry]
for name in task["modules"]:
    why = ""
    try:
        importlib.import_module(name)
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
    os.write(task["answers"], (json.dumps([name, why[:300]]) + "\\n").encode())
"""


def main(task: dict[str, Any]) -> None:
    """Imports and packs. `task`: site, cache, distributions (empty: all), time_s, packed (a path)."""
    modules = modules_of(task["site"], task["distributions"])
    end_s = time.monotonic() + task["time_s"]
    done = 0
    for _ in range(_MAX_CHILDREN):
        if done >= len(modules) or time.monotonic() >= end_s:
            break
        done += import_some(task, modules[done:], done, len(modules), end_s)
    for name in modules[done:]:
        say(failed=name, why="there was no time left")
    say(packed=pack(os.path.join(task["cache"], task["site"].lstrip("/")), task["packed"]))


def modules_of(site: str, distributions: list[str]) -> list[str]:
    """Returns the top-level modules of these distributions, as their RECORD has them."""
    wanted = {name.replace("-", "_") for name in distributions}
    found: dict[str, None] = {}
    for entry in sorted(os.listdir(site)):
        name = entry.partition("-")[0].lower().replace(".", "_")
        if entry.endswith(".dist-info") and (not wanted or name in wanted):
            public = recorded(os.path.join(site, entry, "RECORD"))
            found.update(dict.fromkeys(public))
    return list(found)[:_MAX_MODULES]


def recorded(path: str) -> list[str]:
    """Returns the importable top-level names in a RECORD: packages with an __init__, and single modules."""
    names = set()
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            parts = line.partition(",")[0].strip('"').split("/")
            stem, _, suffix = parts[-1].partition(".")
            is_code = suffix == "py" or suffix.endswith("so")
            if is_code and len(parts) == 1:
                names.add(stem)
            elif is_code and len(parts) == 2 and stem == "__init__":
                names.add(parts[0])
    public = {name for name in names if not name.startswith("_")}
    return sorted(name for name in public or names if name.isidentifier())


def import_some(task: dict[str, Any], modules: list[str], before: int, total: int, end_s: float) -> int:
    """Imports in a child; returns how many of the modules it has dealt with, the one that ended it included."""
    answers, passed = os.pipe()
    task_of_child = {"site": task["site"], "cache": task["cache"], "modules": modules, "answers": passed}
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", _CHILD, json.dumps(task_of_child)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[passed],
        cwd="/tmp",
        start_new_session=True,
    )
    os.close(passed)
    done = 0
    try:
        for name, why in lines(answers, end_s):
            if done >= len(modules) or name != modules[done]:
                break  # not what our own program writes
            done += 1
            if why:
                say(failed=name, why=why)
            say(done=before + done, total=total)
    finally:
        os.close(answers)
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except OSError:
            pass
        child.wait()
    if done < len(modules):
        why = "it took too long" if time.monotonic() >= end_s else f"it ended the interpreter ({child.returncode})"
        say(failed=modules[done], why=why)
        done += 1
    return done


def lines(fd: int, end_s: float) -> Any:
    """Yields the child's answers until it closes the pipe, sends nonsense, or time is up."""
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while selector.select(max(end_s - time.monotonic(), 0)):
            data = os.read(fd, 4096)
            pending += data
            *complete, pending = pending.split(b"\n")
            for line in complete:
                try:
                    name, why = json.loads(line)
                    yield str(name), str(why)[:_MAX_WHY_CHARS]
                except (ValueError, TypeError, RecursionError):
                    return
            if not data or len(pending) > _MAX_ANSWER_BYTES:
                return


def pack(top: str, target: str) -> int:
    """Writes the bytecode below `top` into one file, as bytecode.py of the daemon reads it; returns how many files."""
    count = 0
    with open(target, "wb") as packed:
        for root, _, names in os.walk(top):
            for name in names:
                if not name.endswith(".pyc"):
                    continue
                path = os.path.join(root, name)
                with open(path, "rb") as file:
                    content = file.read()
                relative = os.path.relpath(path, top).encode("utf-8", "surrogateescape")
                packed.write(struct.pack("!HI", len(relative), len(content)) + relative + content)
                count += 1
    return count


def say(**what: object) -> None:
    """Sends a line to the daemon."""
    print(json.dumps(what), flush=True)
