"""Restores the local terminal after a program in a session has used it.

If we detach from a running program, such as an editor, it does not restore the screen, the cursor or the mouse. So
`ModeTracker` records the modes that it sets, and `undo` resets them. `ReplayFilter` removes queries from old output:
the terminal would answer them now, and the program would read the answers as input.

Both read a hostile byte stream: they keep a bounded part of it and never fail.
"""

from __future__ import annotations

import re

_MODES: dict[int, bool] = {
    1: False,  # cursor keys send application codes
    5: False,  # reverse video
    6: False,  # origin at the margins
    7: True,  # lines wrap
    9: False,  # mouse reports, like 1000 to 1003, 1005, 1006, 1015 and 1016
    25: True,  # the cursor is visible
    47: False,  # the alternate screen, like 1047 and 1049
    1000: False,
    1001: False,
    1002: False,
    1003: False,
    1004: False,  # reports of the focus
    1005: False,
    1006: False,
    1015: False,
    1016: False,
    1047: False,
    1049: False,
    2004: False,  # pasted text is bracketed
    2026: False,  # output is shown all at once
}
"""DEC private modes that programs switch, with their defaults."""

_SEQUENCE_BYTES_MAX = 64
_STRING_BYTES_MAX = 4_096

_SWITCH = re.compile(
    rb"\x1b(?:"
    rb"\[\?(?P<modes>[0-9;]{1,40})(?P<switch>[hl])"
    rb"|\[(?P<margins>[0-9;]{0,12})r"
    rb"|(?P<keypad>[=>])"
    rb"|\[>4(?P<other_keys>;[0-9])?m"
    rb"|(?P<kitty>\[[>=][0-9;]{1,8}u)"
    rb"|\[(?P<shape>[0-9]{0,2}) q"
    rb"|\((?P<charset>[0AB])"
    rb"|(?P<reset>c|\[!p)"
    rb")"
)
_UNFINISHED = re.compile(rb"\x1b[^\x1b]{0,%d}\Z" % _SEQUENCE_BYTES_MAX, re.DOTALL)

_QUERY = re.compile(
    rb"\x05"  # ENQ
    rb"|\x1b\[[?>=]?[0-9;]*[cn]"  # device attributes, reports of status and of the cursor's place
    rb"|\x1b\[\??[0-9;]*\$p"  # a mode's state
    rb"|\x1b\[>[0-9]*q"  # the terminal's version
    rb"|\x1b\[[0-9;]*t"  # the window's place, size and title
    rb"|\x1b\[\?u"  # the protocol of the keyboard
    rb"|\x1b\[\?[0-9;]*S"  # graphics
    rb"|\x1b\[[0-9;]*\*y"  # a checksum of the screen
    rb"|\x1b\[[01]?x"
    rb"|\x1bZ"
    rb"|\x1b\][^\x07\x1b]{0,%(max)d}\?(?:\x07|\x1b\\)"  # colours, the clipboard
    rb"|\x1bP[^\x1b]{0,%(max)d}\x1b\\" % {b"max": _STRING_BYTES_MAX}  # device control strings
)
_UNFINISHED_QUERY = re.compile(rb"\x1b(?:\[[0-9;?>=$*]{0,40}|[\]P][^\x07\x1b]{0,%d}\x1b?)?\Z" % _STRING_BYTES_MAX)


class ModeTracker:
    """Tracks the terminal modes that a program's output sets."""

    def __init__(self) -> None:
        self._modes: dict[int, bool] = {}
        self._others: dict[str, bytes] = {}
        self._unfinished = b""

    def feed(self, output: bytes) -> None:
        """Records the modes that the output sets."""
        if b"\x1b" not in output and not self._unfinished:
            return
        text = self._unfinished + output
        end = 0
        for found in _SWITCH.finditer(text):
            end = found.end()
            self._note(found)
        unfinished = _UNFINISHED.search(text, end)
        self._unfinished = unfinished.group() if unfinished else b""

    def undo(self) -> bytes:
        """Returns the bytes that restore the default modes; b"" if none was changed.

        The cursor stays in place, unless the alternate screen ends, which restores its position.
        """
        changed = [mode for mode, is_set in sorted(self._modes.items()) if is_set is not _MODES[mode]]
        modes = b"".join(b"\x1b[?%d%c" % (mode, b"h" if _MODES[mode] else b"l") for mode in changed)
        return b"".join(self._others.values()) + modes

    def _note(self, found: re.Match[bytes]) -> None:
        if found["modes"] is not None:
            for each in found["modes"].split(b";"):
                if each and int(each) in _MODES:
                    self._modes[int(each)] = found["switch"] == b"h"
        elif found["reset"] is not None:
            self._modes.clear()
            self._others.clear()
        elif found["margins"] is not None:
            self._keep("margins", b"\x1b7\x1b[r\x1b8", changed=bool(found["margins"]))
        elif found["keypad"] is not None:
            self._keep("keypad", b"\x1b>", changed=found["keypad"] == b"=")
        elif found["kitty"] is not None:
            self._keep("kitty", b"\x1b[=0u", changed=True)
        elif found["shape"] is not None:
            self._keep("shape", b"\x1b[0 q", changed=found["shape"] not in (b"", b"0"))
        elif found["charset"] is not None:
            self._keep("charset", b"\x1b(B", changed=found["charset"] != b"B")
        else:
            self._keep("other_keys", b"\x1b[>4m", changed=found["other_keys"] is not None)

    def _keep(self, what: str, undo: bytes, *, changed: bool) -> None:
        if changed:
            self._others[what] = undo
        else:
            self._others.pop(what, None)


class ReplayFilter:
    """Removes queries that a terminal would answer from a stream."""

    def __init__(self) -> None:
        self._unfinished = b""

    def feed(self, output: bytes) -> bytes:
        """Returns the output without queries. The beginning of a possible query is held back."""
        text = _QUERY.sub(b"", self._unfinished + output)
        unfinished = _UNFINISHED_QUERY.search(text)
        self._unfinished = unfinished.group() if unfinished else b""
        return text[: len(text) - len(self._unfinished)]

    def finish(self) -> bytes:
        """Returns the held bytes, which new output continues."""
        held, self._unfinished = self._unfinished, b""
        return held
