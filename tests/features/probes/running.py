"""Ways to run an agent, once and again."""

from __future__ import annotations

import gc
import io
import shutil
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import smolagents
from rich.console import Console
from smolagents import ActionStep, InferenceClientModel
from smolagents.memory import PlanningStep, TaskStep
from smolagents.monitoring import AgentLogger, LogLevel, Timing

from examples.scripted import Reply
from tests.features.actor import Actor
from tests.features.observe import NAMESPACE, YES, Seen, checked, probe, run, seen, steps_of, unforeseen
from tests.features.places import Place
from tests.support.free_ports import free_port

SECOND_BROKEN = {"allow_pickle_setting|RecursionError": "no: the second answer is never given"}


@probe
def run_twice(place: Place) -> str:
    with place.agent("x = 20", "final_answer(x + 1)", "final_answer(x + 2)", max_steps=2) as agent:
        first = run(agent)
        second = run(agent, max_steps=1)
    return checked(second, 22, SECOND_BROKEN) if first.answer == 21 else unforeseen(first)


@probe
def conversation(place: Place) -> str:
    with place.agent("x = 20\nfinal_answer(x)", "final_answer(x + 1)", max_steps=1) as agent:
        first = run(agent)
        second = run(agent, reset=False)
        tasks = [step for step in agent.memory.steps if isinstance(step, TaskStep)]
    if first.answer != 20 or len(tasks) != 2:
        return unforeseen(first)
    return checked(second, 21, SECOND_BROKEN)


@probe
def gradio_chat(place: Place) -> str:
    """Two turns, as GradioUI makes them."""
    from smolagents import stream_to_gradio

    def turn() -> str:
        return "\n".join(str(getattr(message, "content", message)) for message in stream_to_gradio(agent, "go"))

    with place.agent("x = 20\nfinal_answer(x)", "final_answer(x + 1)", max_steps=1) as agent:
        first, second = turn(), turn()
        said = Seen(steps=steps_of(agent)).said
    if "**Final answer:** 20" not in first:
        return f"unforeseen: {first!r}"
    if "**Final answer:** 21" in second:
        return YES
    return checked(Seen(error=RuntimeError(said)), None, SECOND_BROKEN)


@probe
def final_answer_checks(place: Place) -> str:
    """The first answer fails the check, the second passes."""

    def is_even(answer: Any, memory: Any, agent: Any = None) -> bool:
        return bool(answer % 2 == 0)

    return checked(seen(place, "final_answer(1)", "final_answer(2)", final_answer_checks=[is_even]), 2)


@probe
def bare_except_around_the_answer(place: Place) -> str:
    code = "try:\n    final_answer(5)\nexcept:\n    caught = True"
    what = seen(place, code)
    return "no: the answer is lost" if what.answer is None and what.error is None else checked(what, 5)


@probe
def streamed_outputs(place: Place) -> str:
    logger = AgentLogger(LogLevel.OFF, Console(file=io.StringIO()))
    with place.agent("x = 6", "final_answer(x * 7)", stream_outputs=True, logger=logger) as agent:
        events = list(agent.run("go", stream=True))
        pieces = [event for event in events if type(event).__name__ == "ChatMessageStreamDelta"]
        what = Seen(getattr(events[-1], "output", None), None, steps_of(agent))
    return checked(what, 42) if len(pieces) > 4 else unforeseen(what)


@probe
def planning(place: Place) -> str:
    plan = Reply("1. I multiply.", "")
    with place.agent(plan, "x = 6", "final_answer(x * 7)", planning_interval=5) as agent:
        what = run(agent)
        plans = [step for step in agent.memory.steps if isinstance(step, PlanningStep)]
    return checked(what, 42) if len(plans) == 1 else unforeseen(what)


@probe
def step_by_step(place: Place) -> str:
    with place.agent("x = 1", "final_answer(x + 1)") as agent:
        agent.python_executor.send_tools({**agent.tools})
        agent.memory.steps.append(TaskStep(task="go", task_images=[]))
        outcome: Any = None
        for number in (1, 2):
            step = ActionStep(step_number=number, timing=Timing(start_time=0.0))
            outcome = agent.step(step)
            agent.memory.steps.append(step)
        return checked(Seen(getattr(outcome, "output", None), None, steps_of(agent)), 2)


@probe
def inspection(place: Place) -> str:
    with place.agent("print('looked')", "final_answer(1)") as agent:
        what = run(agent)
        shown = io.StringIO()
        agent.logger.console = Console(file=shown)
        agent.logger.level = LogLevel.INFO
        agent.replay()
        messages = agent.write_memory_to_messages()
    remembered = any("looked" in str(message.content) for message in messages)
    return checked(what, 1) if remembered and "looked" in shown.getvalue() else unforeseen(what)


@probe
def interruption(place: Place) -> str:
    """Asked for during a step, `interrupt()` ends the run before the next."""

    def stop(step: ActionStep, agent: Any) -> None:
        agent.interrupt()

    what = seen(place, "x = 1", "final_answer(x)", step_callbacks=[stop])
    return YES if "interrupted" in str(what.error) and len(what.steps) == 1 else unforeseen(what)


@probe
def saved_and_loaded(place: Place) -> str:
    """The agent that comes back has the kind of executor that the saved one had, and works."""
    folder = Path(tempfile.mkdtemp(prefix="features-"))
    try:
        with place.agent("final_answer(1)") as agent:
            what = run(agent)
            kind = type(agent.python_executor)
            agent.model = InferenceClientModel("some/model", token="none")  # smolagents loads its own models only
            agent.save(folder)
        if what.answer != 1:
            return unforeseen(what)
        with ExitStack() as stack:
            loaded = place.loaded(folder)
            stack.callback(loaded.cleanup)
            loaded.model = Actor.of("final_answer(2)")
            loaded.logger = AgentLogger(level=LogLevel.OFF)
            return checked(run(loaded), 2) if type(loaded.python_executor) is kind else "no"
    except AttributeError as error:
        # The patch of its final answer is saved, and is no tool of its own.
        return "no: not after a run" if "_FinalAnswerTool" in str(error) else f"unforeseen: {error!r}"
    finally:
        shutil.rmtree(folder)


@probe
def agents_in_parallel(place: Place) -> str:
    """Two agents in two threads, the code of both at the same time."""
    with place.agent("me = 'a'\nimport time\ntime.sleep(0.3)", "final_answer(me)") as one:
        try:
            with place.agent("me = 'b'", "final_answer(me)", own=True) as other:
                return _in_parallel(one, other)
        except RuntimeError as error:
            if "port is already allocated" not in str(error):
                return f"unforeseen: {error!r}"
        gc.collect()  # a half-made executor leaves its connection to the Engine open
        with place.agent("me = 'b'", "final_answer(me)", own=True, executor_kwargs={"port": free_port()}) as other:
            verdict = _in_parallel(one, other)
        return "differs: each needs a `port` of its own" if verdict == YES else verdict


def _in_parallel(*agents: Any) -> str:
    answers = {}

    def go(agent: Any) -> None:
        answers[agent] = run(agent).answer

    threads = [threading.Thread(target=go, args=(agent,)) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [str(answers[agent]) for agent in agents]
    return YES if found == ["a", "b"] else f"unforeseen: {found}"


@probe
def code_before_the_first_run(place: Place) -> str:
    """As the guide of the web browser sets its executor up."""
    with place.agent("final_answer(prepared)") as agent:
        agent.python_executor("prepared = 'yes'")
        return checked(run(agent), "yes")


@probe
def reading_a_variable(place: Place) -> str:
    with place.agent("found = [1, (2, 3)]\nfinal_answer(0)") as agent:
        what = run(agent)
        value = place.read(agent, "found")
    if isinstance(value, str):
        return "differs: its repr, as text"
    return YES if value == [1, (2, 3)] else unforeseen(what)


@probe
def interpreter_tool(place: Place) -> str:
    """The code of an agent that calls tools, and has no executor, runs in another process namespace than the agent."""
    code = "import os\nos.readlink('/proc/self/ns/pid')"
    answer = Reply("", calls=[("final_answer", {"answer": "<<found>>"})], reads={"found": r"(pid:\[\d+\])"})
    with ExitStack() as stack:
        tool = place.interpreter_tool(stack, ["os"])
        model = Actor.of(Reply("", calls=[(tool.name, {"code": code})]), answer)
        agent = smolagents.ToolCallingAgent(tools=[tool], model=model, max_steps=2, verbosity_level=LogLevel.OFF)
        what = run(agent)
    if str(what.answer) == NAMESPACE:
        return "no: it runs in the agent's process"
    return YES if str(what.answer).startswith("pid:") else unforeseen(what)
