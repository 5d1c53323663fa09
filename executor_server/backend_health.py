"""Whether a backend is worth asking for a sandbox now, from what became of those that it was asked for.

A failure counts against sandboxes of the same make only: a client may ask for limits that nothing can start with, and
that must not keep others from the backend. That a backend is full, or does not answer at all, concerns all: or each
make, of which clients can think up many, would wait out its time by itself. Whoever is passed over waits until the
time is over; then a single creation finds out, and the others are still refused until that has ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from executor_server.errors import BackendFull, BackendSilent, ImageNotReady, SandboxFailure
from executor_server.model import SandboxSpec

# Makes whose failure is remembered; the oldest is forgotten for a new one.
_MAX_TROUBLES = 256

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class HealthSettings:
    """How long a backend is passed over."""

    backoff_s: float = 1.0  # after the first failure; twice as long after each further one
    max_backoff_s: float = 60.0
    # Of a wait, so much may be left out at random: what broke together does not come back together.
    jitter: float = 0.25
    max_full_s: float = 600.0  # whatever a full one says


@dataclass
class _Trouble:
    """A failure, and when one creation may find out whether it is over."""

    failure: SandboxFailure
    backoff_s: float
    retry_s: float
    is_tried: bool = False


class BackendHealth:
    """Of one backend. `now_s` is a monotonic clock."""

    def __init__(self, name: str, settings: HealthSettings, now_s: Callable[[], float]) -> None:
        self._name = name
        self._settings = settings
        self._now_s = now_s
        self._of_all: _Trouble | None = None  # full or silent, whatever it is asked for
        self._troubles: dict[str, _Trouble] = {}  # by what the sandbox was to be made of, the oldest first
        self._failed_last = False

    @property
    def state(self) -> str:
        """`up`, `full`, or `down`: as the last creation found it."""
        if self._of_all is not None and isinstance(self._of_all.failure, BackendFull):
            return "full"
        return "down" if self._of_all is not None or self._failed_last else "up"

    def is_well(self, spec: SandboxSpec) -> bool:
        """Whether nothing is known against it, for such a sandbox."""
        return self._of_all is None and spec.fingerprint not in self._troubles

    @contextmanager
    def attempt(self, spec: SandboxSpec) -> Iterator[None]:
        """Around a creation, whose end is remembered.

        Raises SandboxFailure where it is known not to be worth trying; BackendFull, with the time that is left, where
        the backend was full.
        """
        make = spec.fingerprint
        tried = self._of_all or self._troubles.get(make)
        if tried is not None:
            self._begin_trial(tried)
        try:
            yield
        except ImageNotReady:
            self._forget(make)  # it answers
            raise
        except (BackendFull, BackendSilent) as failure:
            self._note_for_all(failure, tried)
            raise
        except SandboxFailure as failure:
            self._note_failure(make, failure, tried)
            raise
        else:
            self._note_success(make)
        finally:
            if tried is not None:
                tried.is_tried = False

    def _begin_trial(self, trouble: _Trouble) -> None:
        left_s = trouble.retry_s - self._now_s()
        if left_s > 0 or trouble.is_tried:
            if isinstance(trouble.failure, BackendFull):
                raise BackendFull(f"{trouble.failure}, as of late", max(left_s, self._settings.backoff_s))
            raise SandboxFailure(f"the {self._name} backend is passed over since it failed: {trouble.failure}")
        trouble.is_tried = True

    def _note_for_all(self, failure: BackendFull | BackendSilent, tried: _Trouble | None) -> None:
        before = self._of_all
        if before is not None and before is not tried:
            return  # somebody who began as early as this one has found it out already
        if isinstance(failure, BackendFull):
            wait_s = min(max(failure.retry_after_s, 0.0), self._settings.max_full_s)
            self._of_all = self._told_of(_Trouble(failure, 0.0, self._now_s() + wait_s))
        else:
            self._of_all = self._told_of(self._longer(before, failure))

    def _note_failure(self, make: str, failure: SandboxFailure, tried: _Trouble | None) -> None:
        answers_again = tried is not None and self._of_all is tried
        if answers_again:
            self._of_all = None
        before = self._troubles.pop(make, None)
        if before is not None and before is not tried and not answers_again:
            self._troubles[make] = before  # as above: that is no further failure
            return
        if len(self._troubles) >= _MAX_TROUBLES:
            del self._troubles[next(iter(self._troubles))]
        self._failed_last = True
        self._troubles[make] = self._told_of(self._longer(before, failure))

    def _longer(self, before: _Trouble | None, failure: SandboxFailure) -> _Trouble:
        """One that lasts twice as long as the one before it."""
        settings = self._settings
        backoff_s = min(max(2 * before.backoff_s if before else 0.0, settings.backoff_s), settings.max_backoff_s)
        wait_s = backoff_s * random.uniform(1 - settings.jitter, 1)
        return _Trouble(failure, backoff_s, self._now_s() + wait_s)

    def _note_success(self, make: str) -> None:
        if self.state != "up":
            _log.warning("backend_is_back", backend=self._name, before=self.state)
        self._of_all, self._failed_last = None, False
        self._forget(make)
        for other in self._troubles.values():  # which may have been the backend's and not their own
            other.retry_s = self._now_s()

    def _forget(self, make: str) -> None:
        self._troubles.pop(make, None)

    def _told_of(self, trouble: _Trouble) -> _Trouble:
        _log.warning(
            "backend_passed_over",
            backend=self._name,
            error=str(trouble.failure),
            retry_after_s=trouble.retry_s - self._now_s(),
        )
        return trouble
