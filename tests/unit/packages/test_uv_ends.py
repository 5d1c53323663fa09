"""The ends of uv: which of them are the packages' fault, and what a client reads of the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from executor_server.core import EgressDenial, EnvironmentFailed, ImageNotReady
from executor_server.guest.egress import reasons
from executor_server.packages.build_sandbox import program
from executor_server.packages.uv import Listener
from executor_server.packages.uv_sandboxes import _Run

PYTHON = {"version": "3.12", "platform": "x86_64-manylinux_2_36", "executable": "/usr/bin/python3"}
SLOT = cast("Any", None)


def ended(exit_code: int, line: str) -> _Run:
    run = _Run(Listener("step"), lambda _: None)
    for said in ({"python": PYTHON}, {"line": line}, {"exit": exit_code}):
        run.take(said)
    return run


@pytest.mark.parametrize("number", [6, 9, 15])
def test_a_signal_is_not_the_packages_fault(number: int) -> None:
    with pytest.raises(ImageNotReady, match=f"killed by signal {number}"):
        ended(-number, "").end(SLOT, [])


@pytest.mark.parametrize(
    ("reason", "message", "said"),
    [
        (reasons.REFUSED_ADDRESS, "index.example:443 is refused: its address is private", "; internal in [egress]"),
        (reasons.NOT_ALLOWED, "index.example:443 is not allowed", "; index_hosts in [environments]"),
        (reasons.TOO_MANY_NEW, "it may make 9 connections a minute", "index.example:443: it may make 9 connections"),
    ],
)
def test_the_host_the_proxys_reason_and_the_key_are_said(reason: str, message: str, said: str) -> None:
    denial = EgressDenial("index.example", 443, reason, message, "10.0.0.1")
    with pytest.raises(ImageNotReady) as caught:
        ended(2, "error sending request for url: tunnel error: unsuccessful").end(SLOT, [denial])
    text = str(caught.value)
    assert said in text
    assert text.count("index.example:443") == 1
    assert "10.0.0.1" not in text


def test_what_uv_says_of_the_packages_stays() -> None:
    with pytest.raises(EnvironmentFailed, match="No solution"):
        ended(1, "No solution found").end(SLOT, [])


def test_the_program_in_the_sandbox_reports_its_python_before_the_end_of_uv(tmp_path: Path) -> None:
    """Without it, each build fails as one that did not report its end."""
    task: dict[str, Any] = {
        "command": ["{python}", "-c", "raise SystemExit(0)"],
        "environment": {},
        "directory": str(tmp_path),
        "input": "",
        "output": None,
        "files": [],
        "file_bytes": 2**20,
    }
    arguments = [sys.executable, "-c", program("run_uv", task)]
    run = _Run(Listener("step"), lambda _: None)
    for line in subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.splitlines():
        run.take(json.loads(line))
    assert run.end(SLOT, []).executable == sys.executable
