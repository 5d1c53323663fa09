"""The daemon opens as many files as the system lets it, and check-host says how many sessions these are."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest

from executor_server.backends import open_files
from executor_server.core.config.config import sessions_for

Limits = tuple[int, int]


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[[Limits], list[Limits]]:
    """Returns a function that sets what the system says, and returns the list of what is set from then on."""

    def limit(there: Limits) -> list[Limits]:
        made: list[Limits] = []
        monkeypatch.setattr(resource, "getrlimit", lambda _kind: there)
        monkeypatch.setattr(resource, "setrlimit", lambda _kind, limits: made.append(limits))
        return made

    return limit


@pytest.mark.parametrize(
    ("there", "made"),
    [
        ((1024, 65_536), [(65_536, 65_536)]),
        ((1024, resource.RLIM_INFINITY), [(2**20, resource.RLIM_INFINITY)]),
        ((1024, 2**30), [(2**20, 2**30)]),
        ((65_536, 65_536), []),
        ((2**30, 2**30), []),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), []),
    ],
)
def test_the_soft_limit_rises_to_the_hard_one_and_never_falls(
    limited: Callable[[Limits], list[Limits]], there: Limits, made: list[Limits]
) -> None:
    found = limited(there)
    open_files.raise_limit()
    assert found == made


def test_a_system_that_refuses_leaves_the_daemon_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_kind: int, _limits: Limits) -> None:
        raise PermissionError

    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    open_files.raise_limit()


def test_check_host_counts_the_limit_in_sessions(limited: Callable[[Limits], list[Limits]]) -> None:
    limited((1024, 65_536))
    finding = open_files.open_files_finding(max_sessions=64)
    assert finding.ok
    assert finding.detail == ("The daemon can open 65,536 files at a time, which is enough for about 10,906 sessions.")


def test_check_host_says_when_the_limit_is_too_low_for_the_sessions(
    limited: Callable[[Limits], list[Limits]],
) -> None:
    limited((256, 1024))
    finding = open_files.open_files_finding(max_sessions=1000)
    assert not finding.ok and not finding.required
    assert "about 154 sessions. sessions.max_sessions is 1,000." in finding.detail
    assert "LimitNOFILE" in finding.remedy


@pytest.mark.parametrize(("gib", "sessions"), [(1, 64), (4, 170), (16, 682), (24, 1000), (512, 1000)])
def test_the_number_of_sessions_follows_from_the_hosts_memory(gib: int, sessions: int) -> None:
    assert sessions_for(gib * 2**30) == sessions
