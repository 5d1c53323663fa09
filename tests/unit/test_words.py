"""The lint of words refuses private words and circuitous openings, and leaves ordinary English alone."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def _load() -> ModuleType:
    """A script of tools/, which is no package."""
    spec = importlib.util.spec_from_file_location("words", ROOT / "tools/words.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["words"] = module
    spec.loader.exec_module(module)
    return module


words = _load()


def python(text: str, path: str = "executor_server/some.py") -> list[str]:
    return [str(finding) for finding in words.check(path, words.read_python(text))]


def page(text: str) -> list[str]:
    return [str(finding) for finding in words.check("docs/some.md", words.read_markdown(text))]


@pytest.mark.parametrize(
    "opening",
    [
        "Of the index, besides names.",
        "What an execution left.",
        "Whether it has ended.",
        "That a variable may end.",
        "How many there are; None when nothing counts.",
        "Why it ended.",
        "Who calls. Raises Forbidden.",
        "Which tools a session may have.",
    ],
)
@pytest.mark.parametrize(
    "form", ['"""{}"""', "x = 1\n# {}\n", "x = 1  # {}", 'x = 1\n"""{}"""', 'def f():\n    """{}"""']
)
def test_an_answer_without_its_question_is_refused(opening: str, form: str) -> None:
    assert len(python(form.format(opening))) == 1


@pytest.mark.parametrize(
    "opening",
    [
        "Returns what the execution left.",
        "True when it has ended.",
        "What does the model see when a step fails? The last lines.",
        "Of course it may fail.",
        "Where the kernel has no pidfd, a process is known by its start.",
        "When the guest is silent, asks again.",
        "For example a table.",
        "Seconds to wait for the guest's first frame.",
        "Official images.",
        "Whatsoever.",
    ],
)
def test_a_subject_or_a_main_clause_is_let_alone(opening: str) -> None:
    assert python(f'"""{opening}"""\n# {opening}\n') == []


def test_a_docstring_that_is_a_subordinate_clause_only_is_refused() -> None:
    assert len(python('"""Where it keeps everything."""')) == 1
    assert (
        len(python('"""For a guest to answer the first frame: an interpreter starts within a tenth of that."""')) == 1
    )
    assert len(python('"""When a lease could not be renewed."""')) == 1


@pytest.mark.parametrize(
    "prose",
    [
        "the client is told of it",
        "it tells them apart",
        "nobody reads it",
        "Whoever asks waits.",
        "a session that somebody uses",
        "the result is judged",
        "lets go of the file",
        "it is let go",
        "begins anew",
        "written to the ledger",
        "a record of the tape",
        "asks the gate",
        "the way to the guest",
        "a way that breaks by itself",
        "while the way is broken",
        "the crew",
        "ends the spare",
        "the keeper renews it",
        "the referee decides",
        "a nest",
        "the kit of the host",
        "the cloud asks for patience",
        "reads the complaints",
        "a container that bears the id",
        "sees to it that it ends",
    ],
)
def test_private_words_are_refused_in_prose_of_every_kind(prose: str) -> None:
    assert python(f'"""The thing: {prose}"""')
    assert python(f"x = 1  # here: {prose}")
    assert page(f"Here: {prose}")
    assert words.check("proto/a.proto", words.read_comments(f"// Here: {prose}\nmessage A {{}}\n", "//"))
    assert words.check("Makefile", words.read_comments(f"all:  ## Here: {prose}\n", "#"))


@pytest.mark.parametrize(
    "prose",
    [
        "in a way, by the way, on its way to the guest, both ways, all the way down, the other way round",
        "no way to an authorized module; a way around the rules; out of the way",
        "it means what it says",
        "takes its turn; turns a request into a spec; loops take turns",
        "nested containers; a relay of the cloud",
        "the session is gone",
        "the line endings of a file",
        "a spare part; to spare the model's context",
        "lets them go on",
        "the place of a file",
        "the user nobody, as uid nobody; nobody:nogroup",
        "operations are what the budget counts",
        "aggregates, propagates, homemaker, crewless",
    ],
)
def test_ordinary_english_is_let_alone(prose: str) -> None:
    assert python(f'"""The thing: {prose}"""\nx = 1  # here: {prose}\n') == []
    assert page(f"Here: {prose}") == []


def test_identifiers_modules_and_keys_are_read() -> None:
    assert python("class TapeError(Exception): ...")
    assert python("def _begin_tape(): ...")
    assert python("from executor_server.guest import place")
    assert python("from executor_server.backends.gone import X")
    assert python("log.warning('tape_damaged')")
    assert python("x = 1", "executor_server/guest/referee.py")
    assert python("x = 1", "executor_server/operations.py")


@pytest.mark.parametrize(
    "code",
    [
        "place = 1",
        "gone = True",
        "file.tell()",
        "pytest.mark.slow",
        "operations = 3",
        "print('told')",
        "def test_a_client_is_told_of_it(): ...",
        "tapestry = aggregate = 1",
        "NOBODY = 65534",
        "url = 'http://example.org/#nobody'",
    ],
)
def test_other_identifiers_are_let_alone(code: str) -> None:
    assert python(code) == []


def test_a_phrase_that_goes_on_in_the_next_line_is_found_where_it_begins() -> None:
    assert python('x = 1\n"""A file.\n\nThe kernel may let\n    go of it.\n"""') == [
        'executor_server/some.py:4: "let go" -> release, drop'
    ]
    assert python("# The kernel may let\n# go of it.\n")[0].startswith("executor_server/some.py:1:")


def test_a_name_is_reported_once_for_a_file() -> None:
    assert python("tape = 1\ntape = 2\n") == ['executor_server/some.py:1: "tape (2 times)" -> segments, journal']


def test_code_of_a_page_is_skipped_and_names_in_its_prose_are_read() -> None:
    assert page("```\nnobody is told\n```\n\n    nobody\n") == []
    assert page("See `nobody:nogroup`.") == []
    assert page("See `Tape` in [the journal](tape.md).") == ['docs/some.md:1: "Tape" -> segments, journal']
    assert len(page("- Of a number.\n- Whether it ends.\n\n| Of what |\n")) == 3
    assert page("## What it costs\n\nThat is why. How it works: see there.\n") == []


def test_sections_that_are_made_of_a_source_are_skipped() -> None:
    assert page("<!-- x: made by tools/x.py -->\n\n| nobody |\n\n<!-- end of x -->\n") == []
    assert len(page("<!-- x: made by tools/x.py -->\n<!-- end of x -->\nnobody\n")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "x = 1  # nobody; words-ok: the Unix user",
        "# words-ok: the Unix user\nx = nobody",
        "# words-ok: the Unix user\n# The user that is nobody,\n# as here.\n",
        '"""The user, nobody."""  # words-ok: the Unix user',
    ],
)
def test_a_finding_is_silenced_with_its_reason(text: str) -> None:
    assert python(text) == []


def test_a_silence_needs_a_reason_and_a_finding() -> None:
    assert "say why" in python("x = tape  # words-ok")[-1]
    assert "say why" in python("x = tape  # words-ok:")[-1]
    assert python("x = 1  # words-ok: no reason at all") == [
        'executor_server/some.py:1: "words-ok" -> silences nothing: delete it'
    ]
    assert page("<!-- words-ok: the Unix user -->\nThe file of nobody.\n") == []


def test_the_command_reports_and_fails(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.words]\npaths = ["a", "Makefile"]\nexclude = ["a/b.py"]\n')
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/words.py").write_bytes((ROOT / "tools/words.py").read_bytes())
    (tmp_path / "Makefile").write_text("all:  # nothing\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b.py").write_text("# nobody\n")
    (tmp_path / "a/c_pb2.py").write_text("# nobody\n")

    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "tools/words.py", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout

    assert run() == (0, "")
    assert run("a/b.py") == (1, 'a/b.py:1: "nobody" -> no client, no process; `is not`\n')
    (tmp_path / "a/run").write_text("#!/bin/sh\necho x  # nobody\n")
    assert run()[0] == 1
    assert run("missing")[0] == 2


def test_what_is_configured_is_there_and_clean() -> None:
    done = subprocess.run(
        [sys.executable, "tools/words.py"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
