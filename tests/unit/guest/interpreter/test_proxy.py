"""aiohttp's sessions heed the environment's proxy by default; nothing else is touched, whatever a program replaced."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from executor_server.guest.interpreter.library_changes import heed_proxy


class Session:
    def __init__(self, *, trust_env: bool = False, other: bool = False) -> None:
        self.trusts, self.other = trust_env, other


def test_the_default_changes_and_an_explicit_value_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", SimpleNamespace(ClientSession=Session))
    assert Session().trusts is False
    heed_proxy()
    assert (Session().trusts, Session(trust_env=False).trusts, Session().other) == (True, False, False)


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


def test_nothing_is_imported_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "aiohttp", raising=False)
    heed_proxy()
    assert "aiohttp" not in sys.modules
