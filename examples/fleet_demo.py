"""Three agents on a fleet of three machines, one of which dies. Run it with `make demo-fleet`.

`executor-server ray up` makes a local cluster of three nodes of Ray, a daemon on each, and a front; the agents know the
front's address only. While the three of them run code, every process of one machine is killed at once: its Ray, its
daemon and its sandboxes. Its agent learns within five seconds that the session is lost, and why, and goes on in a new
session on another machine; the two others don't notice. Only the language model is replaced, by a script.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from scripted import Reply, ScriptedModel
from smolagents import ActionStep, Tool

from executor_client import ExecutorClient
from executor_client.smolagents import CodeAgent

NODES = ("local-1", "local-2", "local-3")
UNCLAIMED = "local-2"
"""The node that no agent asks for; Ray's head is on the first one."""
NODE_LABEL = "remote-executor/node"
LOST_WITHIN_S = 5.0
MIDDLE_TIMEOUT_S = 60.0
END_TIMEOUT_S = 20.0
CODE_S = 8
"""Seconds for which the code of each agent runs: longer than a loss takes to be noticed."""
LOG_TAIL_CHARS = 3000

console = Console(highlight=False)


class DemoFailure(Exception):
    """The fleet did not do what it promises, as the message describes."""


class InTheMiddle(Tool):  # type: ignore[misc]  # smolagents is untyped
    """Runs in this process, like every host tool: code in the sandbox calls it to report that it is in mid-run."""

    name = "in_the_middle"
    description = "Reports that the work has begun."
    inputs = {"host": {"type": "string", "description": "Who reports"}}  # noqa: RUF012
    output_type = "string"

    def __init__(self, all_there: threading.Barrier) -> None:
        super().__init__()
        self._all_there = all_there
        self.calls = 0

    def forward(self, host: str) -> str:
        self.calls += 1
        if self.calls == 1:  # an agent that begins again does not wait for the others
            self._all_there.wait(MIDDLE_TIMEOUT_S)
        return f"{host} is at work"


def script(*, is_victim: bool) -> list[Reply]:
    """Returns the model's replies. Those of the victim expect that its session is lost, and do the work again."""
    begin = Reply(thought="I keep a number for later.", code="numbers = list(range(1_000))\nprint(len(numbers))")
    work = Reply(
        thought="Now the long part.",
        expects=["1000"],
        code=f"""
import time
print(in_the_middle("my code"))
time.sleep({CODE_S})
total = sum(numbers)
print("total", total)
""",
    )
    again = Reply(
        thought="The machine is gone, so I begin again.",
        expects=["is gone", "must be defined again"],
        code="numbers = list(range(1_000))\ntotal = sum(numbers)\nprint('total', total)",
    )
    answer = Reply(thought="That is all.", expects=["total 499500"], code="final_answer(total)")
    return [begin, work, again, answer] if is_victim else [begin, work, answer]


@dataclass
class Run:
    """One agent, and the results of its run."""

    name: str
    answer: Any = None
    lost_s: float = 0.0
    reason: str = ""


# ---------------------------------------------------------------------------------------------------------------------
# The fleet


def fleet_command(state_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "executor_server", "ray", *arguments, "--state-dir", str(state_dir)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)


@contextlib.contextmanager
def own_fleet() -> Iterator[Path]:
    """Makes a fleet, and removes it completely at the end. Raises DemoFailure, also when something of it is left."""
    root = Path(tempfile.mkdtemp(prefix="executor-"))
    try:
        (root / "fleet.toml").write_text("[pool]\nsize = 1\n[sessions]\nmax_sessions = 8\n")
        up = fleet_command(root, "up", "--nodes", str(len(NODES)), "--config", str(root / "fleet.toml"))
        console.print(up.stdout, markup=False, soft_wrap=True)
        if up.returncode != 0:
            raise DemoFailure("`executor-server ray up` failed")
        yield root
    except BaseException:
        for log in sorted(root.rglob("*.log")):
            console.print(f"--- {log}\n{log.read_text(errors='replace')[-LOG_TAIL_CHARS:]}", markup=False)
        raise
    finally:
        down = fleet_command(root, "down")
        console.print(down.stdout.strip(), markup=False)
        left = leftovers(root)
        shutil.rmtree(root)
        if down.returncode != 0 or left:
            raise DemoFailure("after `executor-server ray down` is left:\n" + "\n".join(left or ["it failed"]))


def leftovers(root: Path) -> list[str]:
    """Returns processes that name the fleet's directory or a Ray of ours, as `ps` shows them."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while True:
        listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
        left = [line for line in listed.splitlines() if str(root) in line or "/tmp/rx-ray-" in line]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def kill_machine(root: Path, node: str) -> int:
    """Kills every process of a machine at once, as a power failure would; returns their number.

    A power failure would also end the kernel. Here that goes on, so the control groups of its sandboxes are removed.
    """
    cluster = json.loads((root / "cluster.json").read_text())
    files = (Path(cluster["temporary"]) / f"{node}.pid", root / "nodes" / node / "node.pid")
    leaders = [psutil.Process(json.loads(file.read_text())["pid"]) for file in files]
    for leader in leaders:
        leader.suspend()  # no actor starts its daemon again while we look
    processes = [each for leader in leaders for each in (leader, *leader.children(recursive=True))]
    groups = [group for process in processes for group in control_groups(process)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
    # Those of sandboxes that were just being made have no process yet. Their names begin with the daemon's, too.
    named = {each for group in groups for each in group.parent.glob(f"{group.name.rpartition('-')[0]}-*")}
    wait_until(lambda: all(is_removed(group) for group in named), "control groups of the machine are not empty")
    return len(processes)


def is_removed(group: Path) -> bool:
    """Removes a control group, unless a process in it has not ended yet."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def control_groups(process: psutil.Process) -> set[Path]:
    """Returns the control groups that a daemon has made for the sandbox of a process; none for other processes."""
    try:
        lines = Path(f"/proc/{process.pid}/cgroup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    found = set()
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if Path(path).name.startswith("executor-"):
            trees = {"", controllers, *controllers.split(",")}
            found |= {Path("/sys/fs/cgroup", tree, path.lstrip("/")) for tree in trees}
    return {group for group in found if group.is_dir()}


# ---------------------------------------------------------------------------------------------------------------------
# The agents


class Drama:
    """The meeting point of the agents' code and the machine's end."""

    def __init__(self, agents: int) -> None:
        self.in_the_middle = threading.Barrier(agents + 1)
        self.killed_s = 0.0


def run_agent(name: str, node: str | None, drama: Drama) -> Run:
    """Runs an agent, on the node if one is given. The one without a node is the victim."""
    run = Run(name)

    def after_step(step: ActionStep, agent: CodeAgent) -> None:
        if step.error is not None and "is gone" in str(step.error):
            run.lost_s = time.monotonic() - drama.killed_s
            run.reason = str(step.error)

    replies = script(is_victim=node is None)
    agent = CodeAgent(
        tools=[InTheMiddle(drama.in_the_middle)],
        model=ScriptedModel(replies, f"{name}'s script"),
        additional_authorized_imports=["time"],
        executor_kwargs={
            "limits": {"wall_time_s": 60},
            "labels": {"agent": name},
            "node_labels": {NODE_LABEL: node} if node is not None else {},
        },
        step_callbacks=[after_step],
        max_steps=len(replies),
        verbosity_level=0,
    )
    with agent:
        run.answer = agent.run("Add the numbers below 1,000.")
    return run


def run_agents(root: Path) -> list[str]:
    """Runs the agents, kills the machine of one of them in the middle, and returns the problems."""
    drama = Drama(len(NODES))
    with ThreadPoolExecutor(len(NODES)) as threads, ExecutorClient(f"unix:{root}/front/state/executor.sock") as client:
        runs = [threads.submit(run_agent, f"agent {node[-1]}", node, drama) for node in NODES if node != UNCLAIMED]
        # The victim has no node of its own, so that it may go on anywhere; it gets the one that has no session.
        wait_until(lambda: len(client.list_sessions()) == len(runs), "the first agents have no sessions")
        runs.append(threads.submit(run_agent, "victim", None, drama))
        drama.in_the_middle.wait(MIDDLE_TIMEOUT_S)
        before = {info.labels["agent"]: info.node for info in client.list_sessions()}
        console.print("In mid-run: " + ", ".join(f"{name} on {node}" for name, node in sorted(before.items())))
        drama.killed_s = time.monotonic()
        number = kill_machine(root, before["victim"])
        console.print(f"Killed the {number} processes of {before['victim']}.", style="bold")
        ended = [run.result() for run in runs]
    return problems_of(ended, before)


def problems_of(runs: Sequence[Run], before: dict[str, str]) -> list[str]:
    problems = [f"{run.name} answered {run.answer}" for run in runs if run.answer != sum(range(1_000))]
    if len(set(before.values())) != len(NODES):
        problems.append(f"the agents were not on {len(NODES)} nodes: {before}")
    *others, victim = runs
    problems += [f"{run.name} lost its session: {run.reason}" for run in others if run.lost_s]
    if not 0 < victim.lost_s <= LOST_WITHIN_S:
        problems.append(f"the victim heard of its loss after {victim.lost_s:.1f} s")
    console.print(f"The victim heard of it after {victim.lost_s:.1f} s:", markup=False)
    console.print(victim.reason, markup=False, style="italic")
    if not problems:
        console.print("It went on in a new session. The others did not notice. All have the right answer.")
    return problems


def wait_until(condition: Callable[[], bool], problem: str) -> None:
    deadline = time.monotonic() + MIDDLE_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise DemoFailure(problem)
        time.sleep(0.1)


# ---------------------------------------------------------------------------------------------------------------------


def main() -> int:
    started = time.monotonic()
    try:
        with own_fleet() as root:
            os.environ["EXECUTOR_STATE_DIR"] = str(root / "front/state")
            os.environ["EXECUTOR_ADDRESS"] = f"unix:{root}/front/state/executor.sock"
            problems = run_agents(root)
        console.print("The fleet has ended; no process and no directory of it is left.")
    except DemoFailure as failure:
        problems = [str(failure)]
    for problem in problems:
        console.print(f"FAILED: {problem}", markup=False, style="bold red")
    if not problems:
        console.print(f"The demo succeeded in {time.monotonic() - started:.0f} s.", style="bold green")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
