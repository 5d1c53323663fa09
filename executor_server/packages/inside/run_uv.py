"""Runs uv in a build sandbox, without the sandbox's environment variables, and passes on its output line by line.

It also downloads files, since uv keeps no wheels, and reports that as uv does.

Lines to the daemon: {"python": ...} first, then {"line": ...} for each line of uv or {"downloaded": n} for files, and
{"exit": n} or {"unusable": why}.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import ssl
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MAX_LINE_BYTES = 4096
_MAX_LINES = 4000
_CONNECTIONS = 16
_ATTEMPTS = 3
_SILENCE_S = 30


def main(task: dict[str, Any]) -> None:
    """Runs the command. `task`: command, environment, directory, input, output (a path or None), files, file_bytes.

    `files` are pairs of an address and a name; if there are any, they are downloaded, and no command runs. In the
    command, "{python}" stands for the interpreter.
    """
    say(python=describe())
    # Stops a file that is larger than its archive claims. uv reports the error: SIGXFSZ stays ignored as in Python
    # (`restore_signals`). The sandbox may have a lower limit already, which cannot be raised.
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    file_bytes = task["file_bytes"] if most == resource.RLIM_INFINITY else min(task["file_bytes"], most)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    os.umask(0o022)
    if task["files"]:
        shutil.rmtree(task["environment"]["UV_CACHE_DIR"], ignore_errors=True)  # of the resolution, which is over
        say(exit=download(task["files"], task["directory"], task["environment"]))
        return
    command = [word.replace("{python}", sys.executable) for word in task["command"]]
    output = os.open(task["output"] or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.PIPE,
            env=task["environment"],
            cwd=task["directory"],
            restore_signals=False,
        )
    except OSError as error:
        say(unusable=error.strerror or str(error))
        return
    finally:
        os.close(output)
    stderr = child.stderr
    assert child.stdin is not None and stderr is not None
    try:
        child.stdin.write(task["input"].encode())
        child.stdin.close()
    except BrokenPipeError:  # it ended before it read its input, and reports the reason
        pass
    for count, line in enumerate(iter(lambda: stderr.readline(_MAX_LINE_BYTES), b"")):
        if count < _MAX_LINES:
            say(line=line.decode("utf-8", "replace").rstrip("\n"))
    say(exit=child.wait())


def download(files: list[list[str]], directory: str, environment: dict[str, str]) -> int:
    """Downloads the files; returns 0, or 1 if one of them fails."""
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({name: environment[name + "_proxy"] for name in ("http", "https")}),
        urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=environment["SSL_CERT_FILE"])),
    )

    def path_of(name: str) -> str:
        return os.path.join(directory, name)

    def get(file: list[str]) -> str:
        url, name = file
        why = ""
        title = os.path.basename(url).partition("-")[0]
        for _ in range(_ATTEMPTS):
            try:
                with opener.open(url, timeout=_SILENCE_S) as answer, open(path_of(name), "wb") as target:
                    shutil.copyfileobj(answer, target, 2**18)
                    if answer.length:
                        raise HTTPException("the connection was closed in the middle of the file")
                return ""
            except urllib.error.HTTPError as error:
                kind = "server" if error.code >= 500 else "client"
                why = f"HTTP status {kind} error ({error.code} {error.reason})"
                if kind == "client":
                    break
            except (OSError, HTTPException, ValueError) as error:
                why = f"error sending request: {error}"
        return f"error: Failed to download {title}: {why}"

    failed = 0
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        for count, failure in enumerate(pool.map(get, files), 1):
            say(**({"line": failure} if failure else {"downloaded": count - failed}))
            failed += bool(failure)
    return 1 if failed else 0


def describe() -> dict[str, str]:
    """Describes the properties of the interpreter on which wheels depend."""
    kind, version = platform.libc_ver()
    libc = f"manylinux_{version.replace('.', '_')}" if kind == "glibc" else "musllinux"
    threading = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    return {
        "version": "{}.{}".format(*sys.version_info[:2]) + threading,
        "cache_tag": sys.implementation.cache_tag,
        "platform": f"{platform.machine()}-{libc}",
        "executable": sys.executable,
    }


def say(**what: object) -> None:
    """Sends a line to the daemon."""
    print(json.dumps(what), flush=True)
