"""Secrets: one line of a file, put into a header where a placeholder names it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from executor_server.network.proxy.secrets import MAX_SECRET_BYTES, BadSecret, SecretMissing, Secrets, read_secret


def _read(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return read_secret(os.open(path, os.O_RDONLY))


@pytest.mark.parametrize("content", [b"abc", b"abc\n", b"abc\r\n"])
def test_line_break_at_the_end_is_not_part_of_a_secret(tmp_path: Path, content: bytes) -> None:
    assert _read(tmp_path / "secret", content) == "abc"


def test_secret_of_the_greatest_size_is_read(tmp_path: Path) -> None:
    assert len(_read(tmp_path / "secret", b"x" * MAX_SECRET_BYTES)) == MAX_SECRET_BYTES


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b"\n", "empty"),
        (b"first-part\nsecond-part", "more than one line"),
        (b"first-part\rsecond-part", "more than one line"),
        (b"first-part\n\n", "more than one line"),
        (b"first\0part", "control characters"),
        (b"first\tpart", "control characters"),
        (b"first\x7fpart", "control characters"),
        ("päss".encode(), "printable ASCII"),
        (b" abc", "spaces at its ends"),
        (b"abc ", "spaces at its ends"),
        (b"x" * (MAX_SECRET_BYTES + 1), "larger than 16,384 bytes"),
    ],
)
def test_content_that_no_header_may_have_is_refused_without_being_shown(
    tmp_path: Path, content: bytes, why: str
) -> None:
    with pytest.raises(BadSecret, match=why) as caught:
        _read(tmp_path / "secret", content)
    for part in (b"first", b"second", b"abc", b"xxx"):
        assert part.decode() not in str(caught.value)


def test_descriptor_is_closed_either_way(tmp_path: Path) -> None:
    for content in (b"abc", b"a\nb"):
        path = tmp_path / "secret"
        path.write_bytes(content)
        descriptor = os.open(path, os.O_RDONLY)
        with contextlib.suppress(BadSecret):
            read_secret(descriptor)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_each_placeholder_is_replaced() -> None:
    secrets = Secrets()
    secrets.replace({"user": "u", "key.1": "k"})
    assert secrets.fill("Basic ${user}:${key.1}$ ${user}") == b"Basic u:k$ u"


def test_secret_that_looks_like_a_placeholder_is_not_replaced_again() -> None:
    secrets = Secrets()
    secrets.replace({"a": "${b}", "b": "hidden"})
    assert secrets.fill("${a}") == b"${b}"


def test_secret_that_is_not_there_is_named() -> None:
    secrets = Secrets()
    secrets.replace({"a": "x"})
    with pytest.raises(SecretMissing) as caught:
        secrets.fill("${a} ${b}")
    assert str(caught.value) == "b"


def test_representation_holds_names_only() -> None:
    secrets = Secrets()
    secrets.replace({"bot": "s3cret"})
    assert repr(secrets) == "Secrets(bot)"
