"""The keys that leave a program on the terminal and let it go on, found in what is typed."""

from __future__ import annotations

import re

DETACH_KEYS = "ctrl-]"
"""The default: the key of telnet and virsh, which neither shells nor most editors need."""

_KEYS_MAX = 8
_CONTROL = re.compile(r"ctrl-([a-z@\[\\\]^_])")


class DetachKeys:
    """Passes on what is typed, until the keys come one after the other.

    The beginning of a sequence of several keys is held back until the next key shows whether it goes on.
    """

    def __init__(self, sequence: bytes) -> None:
        """An empty sequence is never found."""
        self._sequence = sequence
        self._held = bytearray()

    def feed(self, typed: bytes) -> tuple[bytes, bool]:
        """Returns the bytes that the program gets, and True after the keys. What follows the keys is dropped: it was
        typed for the program that is left, not for the shell that comes back."""
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
    raise ValueError(f"{text!r} is no key: write ctrl-] or ctrl-p,ctrl-q, or none")
