"""The command line as it is written: commands behind `--`, variables, and names of sessions."""

from __future__ import annotations

import pytest

from executor_client.cli.arguments import make_parser
from executor_client.cli.naming import Located, located, matching_id
from executor_client.cli.port_numbers import PortPair, parse_forward
from executor_client.errors import InvalidRequest, NotFoundError

ANALYSIS = "3f2a0000000000000000000000000001"
OTHER = "3f2b0000000000000000000000000002"
OF_A_NODE = "node-a-00000001770000000000000000000003"
SESSIONS = {ANALYSIS: "analysis", OTHER: "", OF_A_NODE: "3f"}


@pytest.mark.parametrize(
    ("written", "argv"),
    [
        (["exec", "s", "--", "ls", "-l"], ["ls", "-l"]),
        (["exec", "s", "--", "git", "log", "--", "file"], ["git", "log", "--", "file"]),
        (["exec", "-t", "--env", "A=b=c", "s", "--", "sh", "--help"], ["sh", "--help"]),
        (["exec", "s", "--"], []),
        (["exec", "s", "len(x)"], None),
    ],
)
def test_a_command_is_all_that_follows_the_first_dashes(written: list[str], argv: list[str] | None) -> None:
    assert make_parser().parse_args(written).argv == argv


def test_arguments_of_a_program_are_still_its_own() -> None:
    assert make_parser().parse_args(["run", "p.py", "7", "--", "--fast"]).program == ["p.py", "7", "--", "--fast"]


def test_a_variable_may_contain_the_sign_and_its_value_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_parser().parse_args(["exec", "--env", "A=b=c", "s", "1"]).variables == [("A", "b=c")]
    with pytest.raises(SystemExit):
        make_parser().parse_args(["exec", "--env", "=secret", "s", "1"])
    assert "secret" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("8000", PortPair(8000, 8000)),
        ("9000:8000", PortPair(8000, 9000)),
        (":8000", PortPair(8000, 0)),
        ("0:8000", PortPair(8000, 0)),
        ("0.0.0.0:9000:8000", PortPair(8000, 9000, "0.0.0.0")),
        ("[::1]:9000:8000", PortPair(8000, 9000, "::1")),
    ],
)
def test_ports_are_parsed(text: str, pair: PortPair) -> None:
    assert parse_forward(text) == pair


@pytest.mark.parametrize("text", ["", "x", "0", "65536", "1:70000", "8000:", "-1", "1:2:3:4", "::1:9000:8000", "80 "])
def test_ports_that_are_none_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(
            ["port-forward", "s", "--", text] if text.startswith("-") else ["port-forward", "s", text]
        )
    assert "is not a port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "session_id"),
    [
        (ANALYSIS, ANALYSIS),
        ("analysis", ANALYSIS),
        ("3f2a", ANALYSIS),
        ("3f", OF_A_NODE),  # a name comes before the beginnings of ids
        ("77", OF_A_NODE),
        ("node-a-0", OF_A_NODE),
    ],
)
def test_a_session_is_meant_by_its_id_its_name_or_the_beginning_of_its_id(text: str, session_id: str) -> None:
    assert matching_id(SESSIONS, text) == session_id


def test_beginnings_of_several_ids_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="matches 2 sessions"):
        matching_id(SESSIONS, "3f2")


@pytest.mark.parametrize(
    ("sessions", "text", "said"),
    [
        (SESSIONS, "analysys", "there is no session 'analysys'; did you mean analysis?"),
        (SESSIONS, "xyz", "there are analysis, 3f2b00000000, 3f"),
        ({}, "x", "you have no sessions"),
        ({f"{i:032x}": f"job-{i}" for i in range(10, 50)}, "work", "`executor ps` lists your 40 sessions"),
        (SESSIONS, "", "there is no session ''"),
    ],
)
def test_a_name_that_is_none_gets_what_there_is(sessions: dict[str, str], text: str, said: str) -> None:
    with pytest.raises(NotFoundError) as raised:
        matching_id(sessions, text)
    assert said in raised.value.message


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("analysis.v2:out/x", Located("analysis.v2", "out/x")),
        ("3f2a:", Located("3f2a", "")),
        ("./a:b", None),
        (".a:b", None),
        ("plain", None),
    ],
)
def test_a_place_in_a_session_is_told_from_a_local_path(text: str, place: Located | None) -> None:
    assert located(text) == place
