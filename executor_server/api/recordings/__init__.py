"""Recordings that the daemon makes of sessions whose profile says so (`record`), and keeps in its state directory.

It owns their files, their retention, and the thread that writes them. A session never waits for its recording, and
never fails with it. Read `store.py` first; `recorder.py` takes what a session reports, `writer.py` turns it into
entries, and `files.py` keeps them.
"""

from executor_server.api.recordings.recorder import Recorder as Recorder
from executor_server.api.recordings.store import Recordings as Recordings
