"""The examples, run as a person would run them: what they print is what they say they show.

Most run in this process, on one daemon; some as the scripts that they are, with a daemon of their own, which they check
to be gone at the end. All daemons record, and all sessions run again from their recordings as they were.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import smolagents

from examples.scripted import Reply, ScriptedModel
from tests.support.backend_daemon import daemon_on
from tests.support.backends import require, require_image
from tests.support.daemon import Daemon
from tests.support.replayed import EXAMPLES, POLICY, check_replays, seen_in
from tests.support.rounds import ALL, usual

ROOT = Path(__file__).parents[2]
SCRIPT_TIMEOUT_S = 200.0

# Helpers, and what has a test or a Makefile target of its own.
ELSEWHERE = {"fetch", "fleet_demo", "outside", "own_daemon", "rented", "scripted", "vision_browser"}
# tests/frameworks runs them.
ELSEWHERE |= {
    "adk_agent",
    "deepagents_agent",
    "inspect_eval",
    "jupyter_notebook",
    "openai_agent",
    "pydantic_ai_agent",
    "strands_agent",
}

# The lines that matter of what each prints, in order, as patterns of whole lines.
SHOWS = {
    "guided_tour": [r"The answer: \{'total': 1115\.0, 'too few': 'desk'\}"],
    "multi_agent": [
        r"Visitors per day: \d+\.\d, which is right",
        r"They ran on: RemoteExecutor and LocalPythonExecutor",
        r"The heading: ABC!",
    ],
    "inspect_run": [
        r"The answer is 21\.3 \(success, 4 steps\)\.",
        r"Step 1: AgentExecutionError",
        r"Step 2: value \[20\.5, 21\.0, 22\.4\]",
        r"Step 3: value 21\.3",
        r"Printed before the failure: reading 4 lines",
        r"The model would now be sent: \['system', 'user', 'assistant', 'tool-call', .*\]",
        r"All the code:",
        r"print\(\"reading\", len\(lines\), \"lines\"\)",
        r"final_answer\(round\(sum\(readings\) / len\(readings\), 2\)\)",
        r".*Replaying the agent's steps:.*",
        r"Thought: Now the mean\. *",
    ],
    "step_by_step": [
        r"Step 1: 6\d\d\d characters observed",
        r"Step 2: \d\d characters observed",
        r"Step 3: \d\d characters observed",
        r"The answer: 200",
    ],
    "undo": [
        r"Step 1: 5 orders",
        r"Step 2: 0 orders left",
        r"Step 3: nothing printed",
        r"Step 4: 5 orders, 4 with a price, 93\.00 in all",
        r"The answer: \{'orders': 5, 'total': 93\.0\}",
    ],
    "planning": [
        r"A plan: 1\. Guess the number of words\. 2\. Answer\.",
        r"Stopped: Agent interrupted\.",
        r"In memory: \['TaskStep', 'PlanningStep', 'ActionStep'\]",
        r"A plan: They are counted: 1\. Answer\.",
        r"The answer: 9",
    ],
    "checked_answer": [
        r"Refused: Check adds_up failed with error: the shares add up to 101, not to 100",
        r"Accepted: \{'Ada': 29, 'Ben': 29, 'Cleo': 42\}",
    ],
    "conversation": [
        r"First answer: 59",
        r"Step 1 is done\.",
        r"Step 2 is done\.",
        r"Second answer: the 17 primes add up to 440",
        r"It took 2 steps and \d\d words\.",
    ],
    "save_and_load": [
        r"Saved: remote \{'limits': \{'wall_time_s': 1\}\}",
        r"Loaded from the folder: 232\.5 on RemoteExecutor",
        r"Loaded from the dict: 232\.5 on RemoteExecutor",
        r"smolagents' own class: Unsupported executor type: remote",
    ],
    "interpreter_tool": [r"The answer: warmer than usual: 14\.0, 13\.0"],
    "coding_agent": [
        r"The answer: median took the wrong two numbers of an even count: one place too far\.",
        r"-    return \(ordered\[middle\] \+ ordered\[middle \+ 1\]\) / 2",
        r"\+    return \(ordered\[middle - 1\] \+ ordered\[middle\]\) / 2",
    ],
    "gradio_chat": [
        r"Toss three dice, please\. -> \*\*Final answer:\*\* \d+",
        r"And what did they show\? -> \*\*Final answer:\*\*",
        r"\d \d \d",
    ],
    "demo": [r"The demo succeeded in \d+ s\."],
}
NETWORK = "what hosts of the network answered (1)"
AS_SCRIPTS = {"guided_tour", "gradio_chat", "demo"}


def check(name: str, output: str) -> None:
    """Asserts that the output has all that the example is to show, in that order."""
    lines = iter(output.splitlines())
    for pattern in SHOWS[name]:
        assert any(re.fullmatch(pattern, line) for line in lines), f"no line {pattern!r} in its place:\n{output}"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with daemon_on(os.environ.get("EXECUTOR_TEST_BACKEND", "local"), policy=POLICY) as running:
        yield running


def run_script(name: str, directory: Path, *lacks: str) -> str:
    """Runs an example on a daemon of its own. Returns its output, after its sessions ran again as recorded."""
    command = [sys.executable, "-m", "tests.support.replayed", name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=SCRIPT_TIMEOUT_S
    )
    assert script.returncode == 0, script.stdout + script.stderr
    replays = re.findall(r"^REPLAYED .*$", script.stdout, re.MULTILINE)
    assert replays and all(each.endswith(f": as recorded; lacks {list(lacks)}") for each in replays), script.stdout
    return script.stdout


@pytest.mark.parametrize("name", sorted(SHOWS.keys() - AS_SCRIPTS))
def test_example_shows_what_it_says(
    name: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EXECUTOR_STATE_DIR", str(daemon.state_dir))
    monkeypatch.syspath_prepend(EXAMPLES)
    with daemon.client() as client:
        seen = seen_in(client)
        import_module(name).main()
        check(name, capsys.readouterr().out)
        check_replays(client, seen)


@pytest.mark.parametrize("name", usual(sorted(AS_SCRIPTS), but=("gradio_chat", "demo")))
def test_example_runs_as_a_script_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    require("local")
    if name == "gradio_chat":
        pytest.importorskip("gradio", reason="gradio is not installed")
        if tuple(map(int, smolagents.__version__.split(".")[:2])) < (1, 24):
            pytest.skip("GradioUI knows no Gradio 6 before smolagents 1.24")
    check(name, run_script(name, tmp_path))


def test_the_example_with_a_network_shows_a_refusal_a_page_and_an_answer(tmp_path: Path) -> None:
    """It brings a policy and a site of its own, which are gone with it."""
    require("local")
    said = " ".join(run_script("fetch", tmp_path, NETWORK).partition("REPLAYED")[0].split())
    assert "403 search.example:443 is not allowed for this session; allowed: kiln-and-clay.example:" in said
    assert "<h1>Kiln &amp; Clay</h1>" in said
    assert said.endswith("The answer: {'glaze pump': 49.5}")


@pytest.mark.skipif(not ALL, reason="test_vision_browser.py; a screenshot may differ while Chrome still paints")
def test_the_example_with_a_browser_runs_again_as_it_was(tmp_path: Path) -> None:
    """Chrome's messages on stderr differ each time."""
    require_image("browser")
    run_script("vision_browser", tmp_path, NETWORK)


def test_a_scripted_model_takes_nothing_that_it_wrote_itself_for_an_observation() -> None:
    script = [Reply("", "length = len('some word')"), Reply("", "final_answer(length)", expects=["some word"])]
    agent = smolagents.CodeAgent([], ScriptedModel(script), verbosity_level=smolagents.LogLevel.OFF)
    with pytest.raises(smolagents.AgentError, match="'some word' is not in the observation"):
        agent.run("go")


def test_each_example_is_run_here_or_elsewhere_and_starts_in_the_same_way() -> None:
    examples = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py") if path.stem not in ELSEWHERE}
    assert examples.keys() == SHOWS.keys()
    starts = {text[text.index("if __name__") :] for name, text in examples.items() if name != "demo"}
    assert len(starts) == 1
