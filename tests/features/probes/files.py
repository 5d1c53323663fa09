"""Files between the agent's user and its code, and what users do with the executor itself between steps."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import smolagents
from smolagents import ActionStep, local_python_executor

from executor_client.smolagents import CodeTimeoutError
from tests.features.observe import YES, Seen, checked, probe, run, seen, unforeseen
from tests.features.places import Ours, Place
from tests.features.probes.limits import LIMIT_S, NOTHING_TO_SET, has_setting

NO_OPEN = {"Forbidden function evaluation: 'open'": "no: there is no `open`"}
# smolagents' local executor runs it in the directory of the tests, so it makes its file elsewhere.
MAKE = """\
import os, pathlib
os.makedirs({folder!r}, exist_ok=True)
made = pathlib.Path({path!r}).write_text('1,2')
"""
NO_WAY = "no: there is no way to do so"


@probe
def file_given(place: Place) -> str:
    """A file of the caller's, in the directory in which the code runs."""
    code = "final_answer(open('given.csv').read())"
    with place.agent(code) as agent:
        files = getattr(agent.python_executor, "files", None)
        if files is None:
            what = run(agent)
            return NO_WAY if "given.csv" in what.said else checked(what, "1,2", NO_OPEN)
        files.put(b"1,2", "given.csv")
        return checked(run(agent), "1,2", NO_OPEN)


@probe
def file_answer(place: Place) -> str:
    """A path as the final answer is one of a file that the caller can open."""
    with tempfile.TemporaryDirectory() as folder:
        own = isinstance(place, Ours)
        path = "report.csv" if own else f"{folder}/report.csv"
        code = MAKE.format(folder=folder, path=path) + f"final_answer(pathlib.Path({path!r}))"
        settings = {"executor_kwargs": {"download_dir": folder}} if own else {}
        what = seen(place, code, additional_authorized_imports=["os", "pathlib"], **settings)
        if what.error is None and isinstance(what.answer, Path):
            return YES if what.answer.is_file() else "no: a path of the sandbox"
        return checked(what, None, {"Cannot safely serialize|SerializationError": "no: the code gets an error"})


@probe
def files_named(place: Place) -> str:
    """The observation names the files that a step made."""
    with tempfile.TemporaryDirectory() as folder:
        path = "made.txt" if isinstance(place, Ours) else f"{folder}/made.txt"
        code = MAKE.format(folder=folder, path=path)
        what = seen(place, code, "final_answer(1)", additional_authorized_imports=["os", "pathlib"])
    if what.answer != 1:
        return unforeseen(what)
    return YES if "made.txt, 3 bytes" in what.said else "no"


@probe
def gradio_upload(place: Place) -> str:
    """A file that was uploaded to `GradioUI`, by the path that the prompt names."""
    if not hasattr(smolagents.GradioUI, "_process_message"):
        pytest.skip("before smolagents 1.24, GradioUI names uploaded files to the model only")
    with tempfile.TemporaryDirectory() as folder, place.agent("final_answer(open(PATH).read())") as agent:
        (Path(folder) / "rows.csv").write_text("1,2")
        chat = smolagents.GradioUI(agent, file_upload_folder=f"{folder}/in")
        task, images = chat._process_message({"text": "go", "files": [f"{folder}/rows.csv"]})

        # The model's part: it copies the path out of the task.
        generate = agent.model.generate

        def generate_with_path(messages: Any, *args: Any, **kwargs: Any) -> Any:
            message = generate(messages, *args, **kwargs)
            named = agent.task.rpartition("these files: ['")[2].partition("']")[0]
            message.content = message.content.replace("PATH", repr(named))
            return message

        agent.model.generate = generate_with_path
        what = run(agent, task, images=images)
    return checked(what, "1,2", {**NO_OPEN, "No such file": "no: the path is one of the agent's machine"})


# ---------------------------------------------------------------------------------------------------------------------


@probe
def state_read(place: Place) -> str:
    """`agent.python_executor.state["x"]`, in a step callback."""
    read: list[Any] = []

    def look(step: Any, agent: Any) -> None:
        if isinstance(step, ActionStep):
            state = getattr(agent.python_executor, "state", None)
            read.append(None if state is None else state["x"])

    what = seen(place, "x = (1, 2)", "final_answer(x)", step_callbacks=[look])
    if read == [(1, 2), (1, 2)]:
        return YES
    return "no: there is no `state`" if read == [None, None] else unforeseen(what)


@probe
def additional_functions(place: Place) -> str:
    if not has_setting(place, "additional_functions"):
        return NOTHING_TO_SET

    def double(n: int) -> int:
        return 2 * n

    settings = {"additional_functions": {"double": double}}
    return checked(seen(place, "final_answer(double(21))", executor_kwargs=settings), 42)


@probe
def timeout_by_type(place: Place) -> str:
    """A step whose time is up raises smolagents' own `ExecutionTimeoutError`."""
    if not has_setting(place, "time", "limits"):
        return NOTHING_TO_SET
    settings = {"limits": {"wall_time_s": LIMIT_S}} if isinstance(place, Ours) else {str(place.time_limit): LIMIT_S}
    with place.agent(executor_kwargs=settings, max_steps=1) as agent:
        agent.python_executor.send_tools({})
        try:
            agent.python_executor(f"import time\ntime.sleep({2 * LIMIT_S})")
        except getattr(local_python_executor, "ExecutionTimeoutError", CodeTimeoutError):
            return YES
        except Exception as error:  # noqa: BLE001 (it is what is to be seen)
            return unforeseen(Seen(error=error))
    return unforeseen(Seen())
