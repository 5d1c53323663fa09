"""A coding agent: it gets a repository, runs its tests, finds a bug, mends it, and shows the difference.

It has a shell and tools for files that work in its sandbox, and needs no network: the repository travels as a
directory. This one is small and has a bug, and its model is a script that reads what the tools say. `work` does it
with a repository of yours and a language model, too.
"""

from __future__ import annotations

import difflib
import tempfile
from pathlib import Path
from typing import Any

from own_daemon import own_daemon
from scripted import Reply, ScriptedModel
from smolagents import ToolCallingAgent

from executor_client import ExecutorClient, Session
from executor_client.smolagents import FileTools, ShellTool

REPOSITORY = {
    "stats/__init__.py": "from stats.middle import median\n",
    "stats/middle.py": '''"""The middle of some numbers."""


def median(numbers):
    """Returns the middle number, or the mean of the two in the middle."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle] + ordered[middle + 1]) / 2
''',
    "tests/__init__.py": "",
    "tests/test_middle.py": """import unittest

from stats import median


class TestMedian(unittest.TestCase):
    def test_of_an_odd_number(self):
        self.assertEqual(median([3, 1, 2]), 2)

    def test_of_an_even_number(self):
        self.assertEqual(median([4, 1, 3, 2]), 2.5)
""",
}
TASK = "The tests fail. Find out why, mend the code and not the tests, and say what was wrong."
SCRIPT = [
    Reply(thought="I run the tests first.", calls=[("shell", {"command": "python3 -m unittest 2>&1"})]),
    Reply(
        thought="The even case is off by something. Where is median?",
        expects=["exit code 1", "test_of_an_even_number"],
        calls=[("search_files", {"expression": "def median", "pattern": "*.py"})],
    ),
    Reply(
        thought="I look at it.",
        reads={"path": r"(\S+):\d+: def median"},
        calls=[("read_file", {"path": "<<path>>"})],
    ),
    Reply(
        thought="The two in the middle are at middle - 1 and middle.",
        expects=["return (ordered[middle] + ordered[middle + 1]) / 2"],
        calls=[
            (
                "edit_file",
                {
                    "path": "stats/middle.py",
                    "old": "(ordered[middle] + ordered[middle + 1]) / 2",
                    "new": "(ordered[middle - 1] + ordered[middle]) / 2",
                },
            )
        ],
    ),
    Reply(
        thought="Again.",
        expects=["was changed at line"],
        calls=[("shell", {"command": "python3 -m unittest 2>&1"})],
    ),
    Reply(
        thought="They pass.",
        expects=["exit code 0", "OK"],
        calls=[("final_answer", {"answer": "median took the wrong two numbers of an even count: one place too far."})],
    ),
]


def work(session: Session, repository: Path, task: str, model: Any) -> str:
    """Has an agent work on a repository in a session; returns the difference that it made."""
    session.files.put_directory(repository, "")
    agent = ToolCallingAgent(tools=[ShellTool(session=session), *FileTools(session=session)], model=model)
    print("The answer:", agent.run(task))
    with tempfile.TemporaryDirectory() as changed:
        session.files.get_directory("", changed)
        return "".join(_differences(repository, Path(changed)))


def _differences(before: Path, after: Path) -> list[str]:
    paths = {path.relative_to(root) for root in (before, after) for path in root.rglob("*.py")}
    lines: list[str] = []
    for path in sorted(paths):
        old, new = (_lines(root / path) for root in (before, after))
        lines += difflib.unified_diff(old, new, f"a/{path}", f"b/{path}")
    return lines


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True) if path.is_file() else []


def main() -> None:
    """Runs the scripted agent on the small repository, with the daemon that the environment names."""
    with tempfile.TemporaryDirectory() as folder, ExecutorClient() as client, client.create_session() as session:
        for path, text in REPOSITORY.items():
            Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, path).write_text(text)
        model = ScriptedModel(SCRIPT)
        print(work(session, Path(folder), TASK, model))
        assert model.finished, "the script was not played to its end"


if __name__ == "__main__":
    with own_daemon("local"):  # not needed where a daemon runs already
        main()
