"""Executions and the journal of a session: what happened is written down so that the next daemon can go on.

It owns the segments on disk, their checksums and their replay, the memory that events may take, and the registry of
sessions. It must not know who reads the events, nor how a session is driven.
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
