"""Describes a packed call in one line, for a person who decides about it.

Nothing is decoded to an object: no library is loaded, and no value is made. The work and the text are bounded for any
bytes. The text is printable ASCII. Whatever is left out leaves a mark outside of quotes, where the sender has no text:
`...`, or the name of a kind, such as `<np.array>`.
"""

from __future__ import annotations

import json
import re
from binascii import Error as Base64Error
from binascii import a2b_base64

from executor_api.values.limits import DecodeError, ValueLimits
from executor_api.values.packing import unpack
from executor_api.values.tree import load_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

OUTLINE_CHARS_MAX = 1024
"""Characters of an outline."""
_TREE_BYTES_MAX = 64 * 1024
_TEXT_CHARS = 240
_ITEMS = 16
_DEPTH = 6
_LIMITS = ValueLimits(depth=50, nodes=4_000)
OUTLINE_OF_UNKNOWN = "<arguments that can't be shown>"
_TAG = re.compile(r"[a-z][a-z0-9.-]{0,31}")
_BRACKETS = {"list": ("[", "]"), "tuple": ("(", ")"), "set": ("{", "}"), "frozenset": ("{", "}")}
# Kinds whose parts are short and say what they are.
_PLAIN = frozenset(["date", "datetime", "time", "timedelta", "decimal", "fraction", "uuid", "complex", "float", "path"])


def outline_call(packed: bytes) -> str:
    """Returns the arguments of a call, packed as (positional, keywords): `"a.txt", mode="w", parts=[1, 2]`."""
    try:
        tree, buffers = unpack(packed, _LIMITS)
        if len(tree) > _TREE_BYTES_MAX:
            return OUTLINE_OF_UNKNOWN
        root = load_tree(bytes(tree), _LIMITS)
    except DecodeError:
        return OUTLINE_OF_UNKNOWN
    if not _is_call(root):
        return OUTLINE_OF_UNKNOWN
    (_, (_, *positional), (_, *keywords)), outline = root, _Outline(buffers)
    texts = [outline.value(each, _DEPTH) for each in positional[: _ITEMS + 1]]
    names, values = keywords[: 2 * _ITEMS + 2 : 2], keywords[1 : 2 * _ITEMS + 2 : 2]
    texts += [f"{outline.name(name)}={outline.value(value, _DEPTH)}" for name, value in zip(names, values)]
    shown = ", ".join(texts[:_ITEMS] + ["..."] * (len(texts) > _ITEMS))
    return shown if len(shown) <= OUTLINE_CHARS_MAX else f"{shown[: OUTLINE_CHARS_MAX - 4]} ..."


def _is_call(root: Any) -> bool:
    """True for a tuple of a tuple and a dict."""
    if not isinstance(root, list) or len(root) != 3 or root[0] != "tuple":
        return False
    return all(isinstance(part, list) and part[:1] == [tag] for part, tag in zip(root[1:], ("tuple", "dict")))


class _Outline:
    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers

    def name(self, node: Any) -> str:
        return node if isinstance(node, str) and node.isascii() and node.isidentifier() else self.value(node, 1)

    def value(self, node: Any, depth: int) -> str:
        if isinstance(node, str):
            return _quoted(node)
        if isinstance(node, dict):  # no value is one, and its text would be the sender's
            return "<unknown>"
        if not isinstance(node, list):
            return repr(node)
        tag, parts = (node[0], node[1:]) if node else ("", [])
        if not isinstance(tag, str) or not _TAG.fullmatch(tag):
            return "<unknown>"
        if tag in _BRACKETS:
            begin, end = _BRACKETS[tag]
            return (
                f"{begin}{self._items([self.value(each, depth - 1) for each in self._some(parts, depth)], parts)}{end}"
            )
        if tag == "dict" and len(parts) % 2 == 0:
            some = self._some(parts, depth, 2)
            keys = [self.value(each, depth - 1) for each in some[::2]]
            pairs = [f"{key}: {self.value(each, depth - 1)}" for key, each in zip(keys, some[1::2])]
            return f"{{{self._items(pairs, parts[::2])}}}"
        if tag in ("str", "bytes") and len(parts) == 1:
            text = self._text(parts[0])
            return f"<{tag}>" if text is None else _quoted(text) if tag == "str" else f"b{_quoted(text)}"
        if tag in _PLAIN and not any(isinstance(part, list) for part in parts):
            return f"{tag}({', '.join(self.value(part, depth - 1) for part in parts[:_ITEMS])})"
        return "<as before>" if tag == "ref" else f"<{tag}>"

    def _some(self, parts: list[Any], depth: int, each: int = 1) -> list[Any]:
        return parts[: _ITEMS * each] if depth > 0 else []

    def _items(self, shown: list[str], of: list[Any]) -> str:
        return ", ".join([*shown, "..."] if len(shown) < len(of) else shown)

    def _text(self, entry: Any) -> str | None:
        """Returns a text, or bytes as one; only as much as is shown, and one character more."""
        most = 4 * (_TEXT_CHARS + 1)
        if isinstance(entry, str):
            try:
                return a2b_base64(entry[:most]).decode("utf-8", "backslashreplace")
            except (Base64Error, ValueError):
                return None
        if isinstance(entry, int) and 0 <= entry < len(self._buffers):
            return bytes(self._buffers[entry][:most]).decode("utf-8", "backslashreplace")
        return None


def _quoted(text: str) -> str:
    quoted = json.dumps(text[:_TEXT_CHARS]).replace("\x7f", "\\u007f")
    return quoted if len(text) <= _TEXT_CHARS else f"{quoted}..."
