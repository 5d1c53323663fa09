"""The answer of a template's Python is checked, and a refusal is remembered for a while."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from executor_server.backends.e2b import templates
from executor_server.backends.e2b.templates import Templates, read_answer
from executor_server.backends.python_probe import UnusablePython
from executor_server.core.config.backend_config import E2BImage
from executor_server.core.errors import ImageNotReady, SandboxFailure

ANSWER = {"implementation": "cpython", "version": [3, 9], "machine": "x86_64", "user": 0, "memory_bytes": 2**29}
ANSWER |= {"libc": "glibc", "libc_version": ["2", "36"]}


def said(**changes: Any) -> str:
    return f"Welcome!\n\n{templates._MARK}{json.dumps({**ANSWER, **changes})}\nBye\n"


def test_the_probe_is_answered_by_a_real_python() -> None:
    program = [sys.executable, "-I", "-S", "-c", templates._PROGRAM]
    answer = subprocess.run(program, capture_output=True, text=True, check=True, timeout=30).stdout
    reason = json.loads(answer.partition(templates._MARK)[2])
    assert reason["user"] == os.getuid()
    if reason["user"] == 0:
        assert read_answer(answer).version == sys.version_info[:2]


def test_the_greeting_of_a_login_shell_is_ignored() -> None:
    assert read_answer(said()).memory_bytes == 2**29


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": [3, 8]}, "cpython 3.8; CPython 3.9 or newer"),
        ({"implementation": "pypy"}, "pypy 3.9"),
        ({"user": 1000}, "no root"),
    ],
)
def test_an_unusable_python_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusablePython, match=reason):
        read_answer(said(**changes))


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "Welcome!\n",
        f"\n{templates._MARK}",
        f"\n{templates._MARK}[]\n",
        f"\n{templates._MARK}" + "[" * 100_000,
        said(version=[]),
        said(machine="x" * 100),
        said(machine="x\n86"),
        said(memory_bytes="much"),
        said(implementation=["cpython"]),
    ],
)
def test_a_text_that_is_no_answer_is_refused(answer: str) -> None:
    with pytest.raises(ValueError, match="answer"):
        read_answer(answer)


def test_an_unusable_template_is_not_tried_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    known = Templates({"base": E2BImage(template="t")})
    refused = known.refuse("base", "has no Python")
    assert str(refused) == "image 'base' has no Python"
    with pytest.raises(ImageNotReady, match="has no Python") as raised:
        known.of("base")
    assert raised.value.retry_after_s == templates._UNUSABLE_FOR_S
    now_s += templates._UNUSABLE_FOR_S
    assert known.of("base").template == "t"


def test_an_image_that_is_not_configured_is_a_failure() -> None:
    with pytest.raises(SandboxFailure, match="no image 'other'"):
        Templates({"base": E2BImage(template="t")}).of("other")
