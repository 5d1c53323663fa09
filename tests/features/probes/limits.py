"""Time, memory, crashes, and what is left after them."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.features.observe import YES, Seen, checked, probe, run, unforeseen
from tests.features.places import Docker, Local, Ours, Place
from tests.support.polling import eventually

NOTHING_TO_SET = "no: there is none to set"
HANGS = "no: the agent waits for ever"
LIMIT_S = 0.5
SLEEP_S = 2.0
MIB = 2**20

TAKE_MEMORY = f"x = b'x' * {400 * MIB}"
MEMORY_LIMIT = 192 * MIB
CRASH = "import os\nos._exit(3)"

# A run whose end is the end of its process: it needs one of its own.
LOCAL_CRASH = """
from smolagents import CodeAgent
from examples.scripted import Reply, ScriptedModel
model = ScriptedModel([Reply("", "import os\\nos._exit(3)"), Reply("", "final_answer(1)")])
agent = CodeAgent(tools=[], model=model, additional_authorized_imports=["os"], verbosity_level=-1)
print(agent.run("go"))
"""
CHILD_TIMEOUT_S = 60.0
# Seconds for an agent to end that may have noticed the death of its code's process.
NOTICE_S = 3.0
RESTART_TIMEOUT_S = 30.0


@probe
def time_limit(place: Place) -> str:
    if not has_setting(place, "time", "limits"):
        return NOTHING_TO_SET
    what = _slow(place)
    if "exceeded the maximum execution time" not in what.said:
        return unforeseen(what)
    return YES if what.steps[0].timing.duration < SLEEP_S else "differs: when the call returns that it waits for"


@probe
def state_after_the_time_limit(place: Place) -> str:
    return checked(_slow(place), 1) if has_setting(place, "time", "limits") else NOTHING_TO_SET


def has_setting(place: Place, *about: str) -> bool:
    """True when the executor takes a parameter by such a name."""
    with place.agent("1") as agent:
        names = inspect.signature(type(agent.python_executor).__init__).parameters
    return any(each in name for each in about for name in names)


def _slow(place: Place) -> Seen:
    """A step that sleeps past its limit, and one after it."""
    setting = {"limits": {"wall_time_s": LIMIT_S}} if isinstance(place, Ours) else {str(place.time_limit): LIMIT_S}
    code = f"kept = 1\nimport time\ntime.sleep({SLEEP_S})"
    with place.agent(code, "final_answer(kept)", executor_kwargs=setting) as agent:
        return run(agent)


@probe
def memory_limit(place: Place) -> str:
    """The step that hits it fails, and the agent goes on."""
    if isinstance(place, Docker):  # Docker has one for the container, and the executor hands it on
        return _after_a_kernel_died(place, TAKE_MEMORY, mem_limit=MEMORY_LIMIT, memswap_limit=MEMORY_LIMIT)
    if not has_setting(place, "memory", "limits"):
        return NOTHING_TO_SET
    setting = {"limits": {"memory_bytes": MEMORY_LIMIT}}
    with place.agent(TAKE_MEMORY, "final_answer('went on')", executor_kwargs=setting) as agent:
        what = run(agent)
    return checked(what, "went on") if "memory" in str(what.steps[0].error) else unforeseen(what)


@probe
def crash(place: Place) -> str:
    """The step that ends its interpreter fails, and the agent goes on."""
    if isinstance(place, Docker):
        return _after_a_kernel_died(place, CRASH)
    if isinstance(place, Local):
        return _after_a_crash_in_this_process()
    with place.agent(CRASH, "final_answer('went on')", additional_authorized_imports=["os"]) as agent:
        return checked(run(agent), "went on")


@probe
def prelude(place: Place) -> str:
    """Code that is run in each new interpreter: what it defined is there again after a crash."""
    if not has_setting(place, "prelude"):
        return NOTHING_TO_SET
    with place.agent(
        CRASH,
        "final_answer(prepared)",
        additional_authorized_imports=["os"],
        executor_kwargs={"prelude": "prepared = 'there again'"},
    ) as agent:
        return checked(run(agent), "there again")


def _after_a_kernel_died(place: Docker, code: str, **container: Any) -> str:
    """In a container of its own, whose end also ends the wait of the agent's thread."""
    with place.agent(code, "final_answer('went on')", own=True, **place.own_container(**container)) as agent:
        ended: list[Seen] = []
        thread = threading.Thread(target=lambda: ended.append(run(agent)))
        thread.start()
        try:
            jupyter = agent.python_executor.container
            died = eventually(lambda: b"restarting kernel" in jupyter.logs(), timeout_s=RESTART_TIMEOUT_S)
            thread.join(NOTICE_S)
            waits = thread.is_alive()
        finally:
            agent.python_executor.container.kill()
            thread.join()
    if not died:
        return unforeseen(ended[0])
    return HANGS if waits else checked(ended[0], "went on")


def _after_a_crash_in_this_process() -> str:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", LOCAL_CRASH]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False)
    if done.returncode == 3:
        return "no: the agent's process ends"
    return YES if done.stdout.strip() == "1" else f"unforeseen: {done}"
