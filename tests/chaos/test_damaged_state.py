"""The state of a daemon that is down is damaged: what the next one serves is right, or it says that it is lost."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from executor_client import Outcome, PreconditionError
from tests.chaos.conftest import StartDaemon
from tests.chaos.test_daemon_deaths import NO_POOL
from tests.support.daemon import Daemon
from tests.support.rounds import rounds

DAMAGES = rounds(72, 12)
SESSIONS = 12
CODE = "for i in range(200):\n    print(f'line {i}: the amount is {i * 1024:,} EUR')\n{'total': sum(range(200)) * 1024}"
LOGS = "".join(f"line {i}: the amount is {i * 1024:,} EUR\n" for i in range(200))
OUTPUT = {"total": sum(range(200)) * 1024}

Damage = Callable[[bytearray, random.Random], None]


def flip_bits(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice([1, 1, 8])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def zero_a_block(data: bytearray, chance: random.Random) -> None:
    size = chance.choice([16, 512, 4096])
    start = chance.randrange(0, len(data), min(size, len(data)))
    data[start : start + size] = bytes(len(data[start : start + size]))


def overwrite_a_block(data: bytearray, chance: random.Random) -> None:
    size = chance.choice([16, 512])
    start, source = chance.randrange(len(data)), chance.randrange(len(data))
    piece = data[source : source + size]
    data[start : start + len(piece)] = piece


def change_digits(data: bytearray, chance: random.Random) -> None:
    """As an amount that was printed becomes another one, in a record that is well formed."""
    digits = [position for position, byte in enumerate(data) if chr(byte).isdigit()]
    for position in chance.sample(digits, min(3, len(digits))):
        data[position] = ord("0") + (data[position] - ord("0") + 1) % 10


def cut_off(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def damage_of(number: int) -> Damage:
    return (flip_bits, zero_a_block, overwrite_a_block, change_digits, change_digits, cut_off)[number % 6]


@pytest.mark.timeout(400)
def test_what_was_damaged_while_no_daemon_ran_is_told_or_is_right(start: StartDaemon) -> None:
    """Thirteen of seventy-two such results were served as if they were whole, with other amounts."""
    chance = random.Random(12)
    daemon = start(NO_POOL)
    lost = 0
    for first in range(0, DAMAGES, SESSIONS):
        with daemon.client() as client:
            sessions = [client.create_session() for _ in range(SESSIONS)]
            for session in sessions:
                session.execute(CODE, execution_id="e")
            daemon.kill()
            for number, session in enumerate(sessions, first):
                damage_segment(daemon, session.session_id, damage_of(number), chance)
            daemon = start(NO_POOL)
            for number, session in enumerate(sessions, first):
                result = session_result(client, session.session_id)
                if result is None:
                    lost += 1
                else:
                    assert result == (LOGS, OUTPUT), f"damage {number}: wrong, and not told"
            for session in sessions:
                session.close()
    assert lost > DAMAGES // 2, "most of it was damage"


def damage_segment(daemon: Daemon, session_id: str, damage: Damage, chance: random.Random) -> None:
    path = daemon.state_dir / "journals" / session_id / "1"
    harmed = bytearray(path.read_bytes())
    damage(harmed, chance)
    path.write_bytes(harmed)


def session_result(client: object, session_id: str) -> tuple[str, object] | None:
    """Return what the session still says of its execution; None when it says that this is lost."""
    (info,) = [each for each in client.list_sessions() if each.session_id == session_id]  # type: ignore[attr-defined]
    session = client.get_session(session_id)  # type: ignore[attr-defined]
    try:
        result = session.execute(CODE, execution_id="e")
    except PreconditionError as refused:
        assert refused.reason == "SESSION_LOST"
        assert "journal" in info.lost_reason
        return None
    if result.outcome is Outcome.LOST:
        assert "journal" in result.error.message
        assert "journal" in info.lost_reason
        assert LOGS.startswith(result.logs)
        return None
    return result.logs, result.output
