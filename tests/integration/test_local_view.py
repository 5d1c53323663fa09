"""The part of the host's system that code in a local sandbox sees, and the tools that work there."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from executor_server.backends.local.images import probe_image
from executor_server.backends.local.system import build_tools
from tests.contract.harness import Harness, open_harness
from tests.support.backends import require


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    require("local")
    async with open_harness("local") as ready:
        yield ready


async def test_only_libraries_data_and_a_few_tools_of_the_host_are_there(harness: Harness) -> None:
    session = await harness.session()
    run = await harness.run(
        session,
        """
import os, shutil
shown = {name for name in os.listdir("/usr")} - {"lib", "lib32", "lib64", "libx32", "libexec", "share", "bin"}
tools = ["gcc", "cc", "make", "perl", "wget", "nc", "ssh", "sudo", "su", "mount", "apt-get", "dpkg", "docker", "bwrap"]
[sorted(shown), [tool for tool in tools if shutil.which(tool, path="/bin:/sbin:/usr/bin:/usr/sbin:/usr/local/bin")]]
""",
    )
    assert run.output == [[], []], run.ended


async def test_the_usual_tools_are_there(harness: Harness) -> None:
    session = await harness.session()
    run = await harness.run(
        session,
        """
import ctypes.util, subprocess, time, zoneinfo
def out(command):
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout.strip()
open("a", "w").write("b c\\n")
[
    out("cat a | awk '{print $2}' | tr c d"), out("ls"), out("/bin/bash -c 'echo $((6 * 7))'"),
    out("tar czf a.tgz a && tar tzf a.tgz"), out("find . -name a | xargs grep -c b"), out("date -u -d @0 +%Y"),
    ctypes.util.find_library("c"), zoneinfo.ZoneInfo("Europe/Berlin").key,
]
""",
    )
    assert run.output == ["d", "a", "42", "a", "1", "1970", "libc.so.6", "Europe/Berlin"], run.ended


async def test_mountinfo_names_no_directory_of_the_daemon(harness: Harness) -> None:
    """/proc/self/mountinfo said under whose home the daemon keeps its state."""
    session = await harness.session()
    run = await harness.run(session, "print(open('/proc/self/mountinfo').read())")
    assert "/workspace" in run.stdout
    for place in (tempfile.gettempdir(), "runtime", "sandboxes"):
        assert place not in run.stdout


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="the system has no Python")
def test_the_systems_own_python_and_its_names_are_among_the_tools(tmp_path: Path) -> None:
    image = probe_image("x", Path("/usr/bin/python3"))
    tools = build_tools(tmp_path)
    assert (tools / Path("/usr/bin/python3").resolve().name).exists()
    assert not any(str(place).startswith("/usr/bin") for place in image.directories)
    assert build_tools(tmp_path) == tools
    assert not [tool for tool in tools.iterdir() if tool.stat().st_mode & 0o7000]


def test_a_library_from_elsewhere_is_shown_with_its_directory(tmp_path: Path) -> None:
    """A Python that was built against a library in /usr/local/lib starts only where that is visible."""
    python = tmp_path / "base/bin/python3"
    python.parent.mkdir(parents=True)
    tale = '{"implementation": "cpython", "version": [3, 12], "prefixes": ["%s"], "packages": [], "libraries": ["%s"]}'
    library = tmp_path / "local/lib/libssl.so.3"
    python.write_text(f"#!/bin/sh\necho '{tale % (tmp_path / 'base', library)}'\n")
    python.chmod(0o755)
    assert probe_image("x", python).directories == (tmp_path / "base", tmp_path / "local/lib")
