"""Only the real aiohttp is changed to use the proxy, whatever a program put in its place."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from executor_server.guest.interpreter.library_changes import heed_proxy


class Odd:
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@pytest.mark.parametrize(
    "module",
    [None, Odd(), SimpleNamespace(ClientSession=None), SimpleNamespace(ClientSession=Odd()), SimpleNamespace()],
)
def test_another_aiohttp_is_left_alone(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", module)
    heed_proxy()


def test_a_session_without_the_option_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        def __init__(self, *, trusts: bool = False) -> None:
            self.trusts = trusts

    monkeypatch.setitem(sys.modules, "aiohttp", SimpleNamespace(ClientSession=Other))
    heed_proxy()
    assert Other.__init__.__kwdefaults__ == {"trusts": False}
