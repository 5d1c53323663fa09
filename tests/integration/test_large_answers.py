"""Large answers of honest programs, and of one that is not: all of it arrives, or it is said what does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from executor_api.limits import IMAGES_BYTES_MAX, VARIABLES_BYTES_MAX
from executor_client import ExecutorClient, InvalidRequest, OpaqueValue, Outcome, Session
from tests.support.daemon import Daemon

MIB = 1 << 20


@pytest.fixture
def session(daemon: Daemon) -> Iterator[Session]:
    with ExecutorClient(daemon.address, token=daemon.token) as client, client.create_session() as session:
        yield session


IMAGES = """
class Shown:
    def _repr_png_(self):
        return bytes({size})
for _ in range({count}):
    display(Shown())
"after"
"""


def test_sixty_four_large_images_end_no_run_and_what_is_left_out_is_told(session: Session) -> None:
    size = 12 * MIB
    result = session.execute(IMAGES.format(size=size, count=64))
    assert (result.outcome, result.output) == (Outcome.SUCCEEDED, "after")
    shown = IMAGES_BYTES_MAX // size
    assert len(result.image_entries) == shown
    assert result.stderr.count("an image is not shown: the images of an execution") == 64 - shown
    assert session.execute("1 + 1").output == 2


def test_one_image_too_many_is_told(session: Session) -> None:
    result = session.execute(IMAGES.format(size=10, count=66))
    assert len(result.image_entries) == 64
    assert result.stderr.count("an execution shows at most 64 images") == 2


def test_eighty_variables_of_300_kB_arrive(session: Session) -> None:
    session.execute("for number in range(80):\n    globals()[f'v{number}'] = bytes([number]) * 300_000")
    variables = session.get_variables()
    assert {name: value for name, value in variables.items() if name != "number"} == {
        f"v{number}": bytes([number]) * 300_000 for number in range(80)
    }


def test_two_thousand_small_variables_arrive(session: Session) -> None:
    session.execute("for number in range(2_000):\n    globals()[f'v{number}'] = str(number) * 300")
    variables = session.get_variables()
    assert variables["v1999"] == "1999" * 300 and len(variables) == 2_001


def test_variables_that_are_too_large_together_are_refused_in_words(session: Session) -> None:
    count = VARIABLES_BYTES_MAX // (120 * MIB) + 1
    session.execute(f"a = bytes({120 * MIB})\nfor number in range({count}):\n    globals()[f'v{{number}}'] = a")
    with pytest.raises(InvalidRequest, match="name fewer"):
        session.get_variables([f"v{number}" for number in range(count)])
    assert len(session.get_variables(["v0"])["v0"]) == 120 * MIB


def test_a_variable_whose_repr_does_not_end_spoils_no_other(session: Session) -> None:
    session.execute("class C:\n    def __repr__(self):\n        while True:\n            pass\na = 1\nbad = C()\nz = 3")
    read = session.get_variables()
    assert (read["a"], read["z"]) == (1, 3)
    assert isinstance(read["bad"], OpaqueValue) and "operations" in read["bad"].repr
