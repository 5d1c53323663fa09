"""The health of a backend: decides from its last creations whether asking it for a sandbox is worthwhile now.

A failure counts against sandboxes of the same spec only: a client may ask for limits with which nothing starts, and
that must not keep others from the backend. A backend that is full, or does not answer, fails for all specs: clients can
invent many specs, and otherwise each would wait out its own time. After that time a single creation tries the backend,
and others are refused until it has ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from executor_server.core import BackendFull, BackendSilent, ImageNotReady, SandboxFailure, SandboxSpec, SpecUnsupported

# Specs whose failure is remembered; the oldest is forgotten for a new one.
_MAX_TROUBLES = 256

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class HealthSettings:
    """Seconds for which a backend is passed over."""

    backoff_s: float = 1.0  # after the first failure; twice as long after each further one
    max_backoff_s: float = 60.0
    # The largest part of a wait that is randomly left out, so that backends that failed together aren't tried together.
    jitter: float = 0.25
    max_full_s: float = 600.0  # upper bound of the time that a full backend names


@dataclass
class _Trouble:
    """A failure, and the time from which one creation may try again."""

    failure: SandboxFailure
    backoff_s: float
    retry_s: float
    is_tried: bool = False


class BackendHealth:
    """The health of one backend. `now_s` is a monotonic clock."""

    def __init__(self, name: str, settings: HealthSettings, now_s: Callable[[], float]) -> None:
        self._name = name
        self._settings = settings
        self._now_s = now_s
        self._general: _Trouble | None = None  # full or silent, for all specs
        self._troubles: dict[str, _Trouble] = {}  # by fingerprint of the spec, the oldest first
        self._failed_last = False

    @property
    def state(self) -> str:
        """`up`, `full`, or `down`: as the last creation found it."""
        if self._general is not None and isinstance(self._general.failure, BackendFull):
            return "full"
        return "down" if self._general is not None or self._failed_last else "up"

    def is_well(self, spec: SandboxSpec) -> bool:
        """Returns True when no known failure concerns sandboxes of this spec."""
        return self._general is None and spec.fingerprint not in self._troubles

    @contextmanager
    def attempt(self, spec: SandboxSpec) -> Iterator[None]:
        """Surrounds a creation, and notes how it ends.

        Raises SandboxFailure while the backend is passed over; BackendFull, with the remaining time, when it was full.
        """
        make = spec.fingerprint
        tried = self._general or self._troubles.get(make)
        if tried is not None:
            self._begin_trial(tried)
        try:
            yield
        except (ImageNotReady, SpecUnsupported):
            self._forget(make)  # often known without asking the backend, so one that is silent or full stays so
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
        before = self._general
        if before is not None and before is not tried:
            return  # another creation that began as early has noted it already
        if isinstance(failure, BackendFull):
            wait_s = min(max(failure.retry_after_s, 0.0), self._settings.max_full_s)
            self._general = self._logged(_Trouble(failure, 0.0, self._now_s() + wait_s))
        else:
            self._general = self._logged(self._longer(before, failure))

    def _note_failure(self, make: str, failure: SandboxFailure, tried: _Trouble | None) -> None:
        answers_again = tried is not None and self._general is tried
        if answers_again:
            self._general = None
        before = self._troubles.pop(make, None)
        if before is not None and before is not tried and not answers_again:
            self._troubles[make] = before  # as above: not a further failure
            return
        if len(self._troubles) >= _MAX_TROUBLES:
            del self._troubles[next(iter(self._troubles))]
        self._failed_last = True
        self._troubles[make] = self._logged(self._longer(before, failure))

    def _longer(self, before: _Trouble | None, failure: SandboxFailure) -> _Trouble:
        """Returns a trouble that lasts twice as long as the one before it."""
        settings = self._settings
        backoff_s = min(max(2 * before.backoff_s if before else 0.0, settings.backoff_s), settings.max_backoff_s)
        wait_s = backoff_s * random.uniform(1 - settings.jitter, 1)
        return _Trouble(failure, backoff_s, self._now_s() + wait_s)

    def _note_success(self, make: str) -> None:
        if self.state != "up":
            _log.warning("backend_is_back", backend=self._name, before=self.state)
        self._general, self._failed_last = None, False
        self._forget(make)
        for other in self._troubles.values():  # their cause may have been the backend, which works again
            other.retry_s = self._now_s()

    def _forget(self, make: str) -> None:
        self._troubles.pop(make, None)

    def _logged(self, trouble: _Trouble) -> _Trouble:
        _log.warning(
            "backend_passed_over",
            backend=self._name,
            error=str(trouble.failure),
            retry_after_s=trouble.retry_s - self._now_s(),
        )
        return trouble
