"""Clients that begin executions and read nothing of them: the daemon holds no more than it may, and nothing hangs."""

from __future__ import annotations

from tests.chaos.conftest import StartDaemon
from tests.chaos.test_daemon_deaths import NO_POOL, leave_after_the_first_event
from tests.support.memory import growth_of
from tests.support.polling import eventually

MIB = 1 << 20
PRINTS = "line = 'x' * 1000\nfor _ in range(12_000):\n    print(line)"
ENDLESS = f"import time\n{PRINTS}\ntime.sleep(1e6)"
SESSIONS = 12


def test_what_many_sessions_print_unread_is_bounded_for_the_daemon(start: StartDaemon) -> None:
    """Each may hold 64 MiB, so sixty-four of them took 4 GiB of the daemon."""
    daemon = start(f"{NO_POOL}\nsessions.journal_total_bytes = {32 * MIB}")
    limits = {"output_bytes": 16 * MIB}
    with daemon.client() as client:
        sessions = [client.create_session(limits=limits) for _ in range(SESSIONS)]
        growth_bytes = growth_of(daemon.process.pid)
        for session in sessions:
            leave_after_the_first_event(daemon, session, PRINTS)

        def journals_bytes() -> int:
            return sum(path.stat().st_size for path in (daemon.state_dir / "journals").glob("*/*"))

        assert eventually(lambda: journals_bytes() > 32 * MIB)
        with client.create_session() as another:
            assert another.execute("6 * 7").output == 42, "others go on"
        (grown_bytes,) = growth_bytes()
        assert grown_bytes < 3 * 32 * MIB
        # A client that comes back has all of it.
        result = sessions[0].execute(f"print(1)\n{PRINTS}", execution_id="full")
        assert result.logs == "1\n" + ("x" * 1000 + "\n") * 12_000
        for session in sessions:
            session.close()
