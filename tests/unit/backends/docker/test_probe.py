"""The answer of an image's Python is hostile input: the image's author controls it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from executor_server.backends.docker.engine import EngineImage
from executor_server.backends.docker.probe import PreparedImage, UselessImage, read_answer

IMAGE = EngineImage("sha256:abc", "amd64", "linux", ("/data",))
STATUS = {"CapPrm:": "0", "CapEff:": "0", "CapBnd:": "0", "NoNewPrivs:": "1\n", "Seccomp:": "2\n"}
GOOD: dict[str, Any] = {
    "implementation": "cpython",
    "version": [3, 11],
    "executable": "/usr/bin/python3",
    "user": 2_000_000_001,
    "writes_root": False,
    "interfaces": ["lo"],
    "processes": ["1"],
    "status": STATUS,
    "kernel": "6.1.0",
}


def _read(**other: Any) -> PreparedImage | UselessImage:
    return read_answer(IMAGE, "6.1.0", json.dumps(GOOD | other).encode())


def test_a_confined_python_can_serve() -> None:
    image = _read()
    assert isinstance(image, PreparedImage)
    assert (image.python, image.version, image.volumes) == ("/usr/bin/python3", (3, 11), ("/data",))
    assert image.confinement.weaknesses == ()


@pytest.mark.parametrize(
    ("implementation", "version", "reason"), [("pypy", [3, 10], "pypy 3.10"), ("cpython", [3, 8], "cpython 3.8")]
)
def test_another_python_is_refused_by_its_name(implementation: str, version: list[int], reason: str) -> None:
    image = _read(implementation=implementation, version=version)
    assert isinstance(image, UselessImage)
    assert reason in image.reason and "CPython 3.9 or newer" in image.reason


def test_a_python_too_old_for_the_probe_is_refused_by_its_version() -> None:
    image = read_answer(
        IMAGE, "6.1.0", b'{"implementation": "python", "version": [2, 7], "executable": "/usr/bin/python"}'
    )
    assert isinstance(image, UselessImage) and "python 2.7" in image.reason


@pytest.mark.parametrize(
    ("changes", "weakness"),
    [
        ({"user": 0}, "as user 0"),
        ({"interfaces": ["lo", "eth0"]}, "eth0"),
        ({"processes": ["1", "2"]}, "other processes"),
        ({"writes_root": True}, "can write"),
        ({"status": STATUS | {"CapBnd:": "a80425fb"}}, "capabilities"),
        ({"status": STATUS | {"NoNewPrivs:": "0"}}, "capabilities"),
        ({"status": STATUS | {"Seccomp:": "0"}}, "No seccomp filter"),
    ],
)
def test_a_missing_wall_is_a_weakness(changes: dict[str, Any], weakness: str) -> None:
    image = _read(**changes)
    assert isinstance(image, PreparedImage)
    assert len(image.confinement.weaknesses) == 1
    assert weakness in image.confinement.weaknesses[0]


def test_a_kernel_of_its_own_needs_no_filter() -> None:
    """gVisor and virtual machines load no filter."""
    image = _read(status=STATUS | {"Seccomp:": "0"}, kernel="4.4.0")
    assert isinstance(image, PreparedImage)
    assert image.confinement.weaknesses == ()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"{}",
        b"3",
        b"\xff",
        b"[" * 100_000,
        b'{"implementation": "cpython", "version": "x"}',
        json.dumps(GOOD | {"executable": "python3"}).encode(),
        json.dumps(GOOD | {"executable": "/" + "x" * 5000}).encode(),
        json.dumps(GOOD | {"executable": "/\x1b[2J"}).encode(),
        json.dumps(GOOD | {"implementation": "\ud800"}).encode(),
        json.dumps(GOOD | {"interfaces": ["lo\n"]}).encode(),
        json.dumps(GOOD | {"user": float("inf")}).encode(),
        json.dumps(GOOD | {"status": {}}).encode(),
        json.dumps(GOOD | {"pad": "x" * 70_000}).encode(),
    ],
)
def test_an_unreadable_answer_is_no_python(answer: bytes) -> None:
    assert read_answer(IMAGE, "6.1.0", answer) == UselessImage("has a Python that does not answer like one")
