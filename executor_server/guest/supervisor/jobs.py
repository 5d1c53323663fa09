"""Jobs: the daemon's requests that are done one after the other, in order of arrival."""

from __future__ import annotations

from ..wire.lean import deque
from ..wire.messages import (
    Configure,
    Execute,
    ExportState,
    FindModules,
    GetVariables,
    RegisterTools,
    RestoreState,
    Restrict,
    SetVariables,
)
from ..wire.savepoint_messages import ListSavepoints, RollBack, TakeSavepoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional, Sequence, Union

    from ..wire.schema import Request

    JobRequest = Union[Execute, Request]

# Jobs that may wait. Executions don't count: the daemon sends one at a time.
MAX_JOBS = 64
KINDS = (
    *(Execute, Configure, Restrict, RegisterTools, SetVariables, GetVariables),
    *(ExportState, RestoreState, FindModules, TakeSavepoint, RollBack, ListSavepoints),
)


class Job:
    __slots__ = ("blobs", "body", "request", "saved")

    def __init__(self, request: JobRequest, body: bytes, blobs: Sequence[str] = ()) -> None:
        self.request = request
        self.body = body
        self.blobs = blobs  # those that it has claimed
        self.saved = False  # its savepoint was taken or refused, or its branch made

    @property
    def needs_interpreter(self) -> bool:
        """False for requests that the supervisor handles: RESTRICT, CONFIGURE without a prelude, rollbacks, lists."""
        if isinstance(self.request, Configure):
            return self.request.settings + self.request.env < len(self.body)
        return not isinstance(self.request, (Restrict, RollBack, ListSavepoints))


class JobQueue:
    """The jobs that wait. While it is `held`, none is started."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self.held = False

    @property
    def ready(self) -> bool:
        """True when a job waits and may be started."""
        return bool(self._jobs) and not self.held

    @property
    def full(self) -> bool:
        """True when no request but an execution may be added.

        The daemon limits the requests that callers wait for, but requests of callers that gave up are here, too.
        """
        return len(self._jobs) >= MAX_JOBS

    def add(self, job: Job) -> None:
        self._jobs.append(job)

    def put_back(self, job: Job) -> None:
        """Puts a job that has to begin again before all others."""
        self._jobs.appendleft(job)

    def take(self) -> Job:
        """Removes and returns the next job; call it only if one is `ready`."""
        return self._jobs.popleft()

    def __contains__(self, job: Job) -> bool:
        return job in self._jobs

    def cancel(self, execution_id: str) -> Optional[Execute]:
        """Removes a waiting execution, and returns it."""
        for job in self._jobs:
            if isinstance(job.request, Execute) and job.request.id == execution_id:
                self._jobs.remove(job)
                return job.request
        return None
