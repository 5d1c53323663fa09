"""Kinds that are asked for often are kept, a few of them, and not for ever."""

from __future__ import annotations

from dataclasses import replace

from executor_server.core.model import SandboxSpec
from executor_server.core.packages import PackagesSpec
from executor_server.sessions.pool.asked_kinds import AskedKinds, AskedSettings
from tests.support.fake_backend import SPEC

SETTINGS = AskedSettings(max_kinds=2, requests=3, within_s=10.0, kept_s=100.0)


def with_packages(*requirements: str) -> SandboxSpec:
    return replace(SPEC, packages=PackagesSpec(requirements))


ONE, TWO, THREE = with_packages("one"), with_packages("two"), with_packages("three")


def asked(kinds: AskedKinds, spec: SandboxSpec, *times_s: float) -> None:
    for time_s in times_s:
        kinds.note(spec, time_s)


def test_three_requests_within_the_time_are_often() -> None:
    kinds = AskedKinds(SETTINGS)
    asked(kinds, ONE, 0.0, 5.0)
    assert kinds.kept == set()
    asked(kinds, ONE, 11.0)
    assert kinds.kept == set(), "the first of the three is too long ago"
    asked(kinds, ONE, 12.0)
    assert kinds.kept == {ONE}


def test_none_is_kept_with_the_setting_off() -> None:
    off = AskedKinds(replace(SETTINGS, max_kinds=0))
    asked(off, ONE, 0.0, 0.0, 0.0)
    assert off.kept == set()


def test_the_least_recently_asked_kind_goes_for_a_third() -> None:
    kinds = AskedKinds(SETTINGS)
    asked(kinds, ONE, 0.0, 0.0, 0.0)
    asked(kinds, TWO, 1.0, 1.0, 1.0)
    asked(kinds, ONE, 2.0)
    asked(kinds, THREE, 3.0, 3.0, 3.0)
    assert kinds.kept == {ONE, THREE}


def test_a_kind_that_is_not_asked_for_any_more_goes() -> None:
    kinds = AskedKinds(SETTINGS)
    asked(kinds, ONE, 0.0, 0.0, 0.0)
    kinds.expire(100.0)
    assert kinds.kept == {ONE}
    kinds.expire(100.1)
    assert kinds.kept == set()
    asked(kinds, ONE, 101.0)
    assert kinds.kept == set(), "its old requests are forgotten"


def test_clients_that_invent_kinds_fill_no_memory() -> None:
    kinds = AskedKinds(SETTINGS)
    asked(kinds, ONE, 0.0, 0.0, 0.0)
    asked(kinds, TWO, 0.0, 0.0)
    for number in range(640):
        asked(kinds, with_packages(f"p{number}"), 1.0, 1.0, 1.0)
    assert len(kinds.kept) == 2 and ONE not in kinds.kept
    asked(kinds, TWO, 2.0)
    assert TWO not in kinds.kept, "its earlier requests are forgotten"
