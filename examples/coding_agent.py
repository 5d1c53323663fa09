"""A coding agent: it gets a repository, runs its tests, finds a bug, mends it, and shows the difference.

It has a shell and tools for files that work in its sandbox, and needs no network: the repository travels as a
directory. This one is small and has a bug, and its model is a script that reads what the tools say. With a repository
of yours, a directory or an address for git, and a language model by its name for LiteLLM:

    python examples/coding_agent.py --repo . --model anthropic/claude-sonnet-4-5 --task "The tests fail. Mend the code."
"""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from own_daemon import own_daemon
from scripted import Reply, ScriptedModel
from smolagents import LiteLLMModel, ToolCallingAgent

from executor_client import ExecutorClient, Session
from executor_client.smolagents import FileTools, ShellTools

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
        expects=["at line"],
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
    agent = ToolCallingAgent(tools=[*ShellTools(session=session), *FileTools(session=session)], model=model)
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


def fetched(repository: str, folder: Path) -> Path:
    """Returns the directory of a repository; one with an address is cloned into `folder` first."""
    if Path(repository).is_dir():
        return Path(repository)
    subprocess.run(["git", "clone", "--quiet", "--depth=1", "--", repository, str(folder)], check=True)
    return folder


def main() -> None:
    """Runs the agent with the daemon that the environment names; without `--repo` the script, on its own repository."""
    parser = argparse.ArgumentParser(description="A coding agent in a sandbox.")
    parser.add_argument("--repo", help="a directory, or an address for git; else a small one that is made here")
    parser.add_argument("--model", help="a language model, by its name for LiteLLM; it needs pip install litellm")
    parser.add_argument("--task", default=TASK)
    options = parser.parse_args(sys.argv[1:] if sys.argv[0].endswith("coding_agent.py") else [])
    if options.repo and not options.model:
        parser.error("--repo needs --model: the script knows its own repository only")
    with tempfile.TemporaryDirectory() as folder, ExecutorClient() as client, client.create_session() as session:
        model = LiteLLMModel(options.model) if options.model else ScriptedModel(SCRIPT)
        if options.repo:
            repository = fetched(options.repo, Path(folder))
        else:
            repository = Path(folder)
            for path, text in REPOSITORY.items():
                (repository / path).parent.mkdir(parents=True, exist_ok=True)
                (repository / path).write_text(text)
        print(work(session, repository, options.task, model))
        assert options.model or model.finished, "the script was not played to its end"


if __name__ == "__main__":
    with own_daemon("local"):  # not needed where a daemon runs already
        main()
