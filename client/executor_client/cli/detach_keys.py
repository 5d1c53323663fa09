"""Finds the keys that detach from a program in the typed input."""

from __future__ import annotations

import re

DETACH_KEYS = "ctrl-]"
"""The default: the key of telnet and virsh, which shells and most editors do not use."""

_KEYS_MAX = 8
_CONTROL = re.compile(r"ctrl-([a-z@\[\\\]^_])")


class DetachKeys:
    """Passes typed input on until the detach keys appear.

    The start of a sequence is held back until the next key shows whether it continues.
    """

    def __init__(self, sequence: bytes) -> None:
        """An empty sequence never matches."""
        self._sequence = sequence
        self._held = bytearray()

    def feed(self, typed: bytes) -> tuple[bytes, bool]:
        """Returns the bytes for the program, and True after the keys. Later input is dropped: it was typed for the
        program, not for the local shell."""
        if not self._sequence:
            return typed, False
        passed = bytearray()
        for byte in typed:
            self._held.append(byte)
            if self._held == self._sequence:
                self._held.clear()
                return bytes(passed), True
            while not self._sequence.startswith(self._held):
                passed.append(self._held.pop(0))
        return bytes(passed), False


def parse_keys(text: str) -> bytes:
    """Parses "ctrl-p,ctrl-q", "ctrl-]" or "none". Raises ValueError."""
    if text == "none":
        return b""
    keys = text.split(",")
    if len(keys) > _KEYS_MAX:
        raise ValueError(f"{text!r} has more than {_KEYS_MAX} keys")
    return b"".join(_key(each) for each in keys)


def _key(text: str) -> bytes:
    control = _CONTROL.fullmatch(text.lower())
    if control is not None:
        return bytes([ord(control[1].upper()) & 0x1F])
    if len(text) == 1 and "!" <= text <= "~":
        return text.encode()
    raise ValueError(f"{text!r} is not a key: write ctrl-] or ctrl-p,ctrl-q, or none")
