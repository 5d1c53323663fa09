"""Executions and the journal of a session, from which the next daemon recovers them.

It owns the segments on disk, their checksums and replay, the memory of events, and the registry of sessions. It must
not know who reads the events, nor how a session is driven. Read `state.py` first.
"""

from executor_server.sessions.journal.execution import Execution, ExecutionRequest, ToolFailure
from executor_server.sessions.journal.journal import Journal, JournalLimits
from executor_server.sessions.journal.memory import JournalMemory
from executor_server.sessions.journal.process_journal import (
    MAX_FINISHED_PROCESSES,
    MAX_UNREAD_PROCESSES,
    ProcessJournal,
)
from executor_server.sessions.journal.process_log import ProcessLog
from executor_server.sessions.journal.records import SegmentError
from executor_server.sessions.journal.registry import Registry, RegistryError, SessionRecord, SessionUse
