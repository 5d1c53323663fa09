"""Highlighted code is the code, whatever it is."""

from __future__ import annotations

import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_server.console.highlight import highlight
from executor_server.console.text import clean

_PIECES = (
    "\n",
    " ",
    "\t",
    "def f():\n  pass\n",
    '"""',
    "'",
    'f"{',
    "}",
    "(",
    "\\",
    "\\\n",
    "#",
    "1_0",
    "é",
    "<b>",
    "&",
    "\f",
    "match x:",
)


@given(st.lists(st.sampled_from(_PIECES)).map("".join) | st.text())
def test_highlighted_code_is_the_code(code: str) -> None:
    shown = str(highlight(code))
    assert set(re.findall(r"<[^>]*>", shown)) <= {
        "</span>",
        *(f'<span class="{name}">' for name in ("keyword", "builtin", "name", "string", "number", "comment")),
    }
    assert html.unescape(re.sub(r"<[^>]*>", "", shown)) == clean(code)


@pytest.mark.parametrize(
    "code", ["(" * 65_536, '"""' + "\n" * 65_536, "\\\n" * 32_768, "x=1\n" * 16_384, "'\\" * 32_768]
)
def test_hostile_code_is_shown(code: str) -> None:
    """In time in proportion to it: with a tokenizer that is quadratic here, the test would time out."""
    assert len(highlight(code)) >= len(str(clean(code[:65_536])))
