"""Jobs: the daemon's requests that are done one after the other, in order of arrival."""

from __future__ import annotations

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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Union

    JobRequest = Union[
        Configure, Restrict, Execute, RegisterTools, SetVariables, GetVariables, ExportState, RestoreState, FindModules
    ]

# Jobs that may wait, besides executions, which the daemon sends one at a time.
MAX_JOBS = 64
KINDS = (
    *(Execute, Configure, Restrict, RegisterTools, SetVariables, GetVariables),
    *(ExportState, RestoreState, FindModules),
)


class Job:
    __slots__ = ("body", "request")

    def __init__(self, request: JobRequest, body: bytes) -> None:
        self.request = request
        self.body = body

    @property
    def needs_interpreter(self) -> bool:
        """False for RESTRICT, and for CONFIGURE without a prelude: they are settings that the supervisor keeps."""
        if isinstance(self.request, Configure):
            return self.request.settings < len(self.body)
        return not isinstance(self.request, Restrict)
