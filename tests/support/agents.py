"""Agents whose model plays a script, on a given daemon."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import smolagents
from smolagents import FinalAnswerTool, LogLevel

from examples.scripted import Reply, ScriptedModel
from executor_client.smolagents import CodeAgent
from tests.support.daemon import Daemon

takes_executor = pytest.mark.skipif(
    "executor" not in inspect.signature(smolagents.CodeAgent.__init__).parameters,
    reason=f"smolagents {smolagents.__version__} has no executor= yet (1.23 has)",
)


def scripted(*script: str | Reply) -> ScriptedModel:
    """A model that replies with these codes; a `Reply` also says which text its prompt must contain."""
    return ScriptedModel([each if isinstance(each, Reply) else Reply("", each) for each in script])


def agent_on(daemon: Daemon, *script: str | Reply, tools: Sequence[Any] = (), **options: Any) -> CodeAgent:
    """An agent of our class, with a step for each reply."""
    executor_kwargs = {**daemon.access, **options.pop("executor_kwargs", {})}
    options = {"max_steps": len(script), "verbosity_level": LogLevel.OFF, **options}
    return CodeAgent(tools=list(tools), model=scripted(*script), executor_kwargs=executor_kwargs, **options)


def mend_final_answer() -> None:
    """Undoes what an executor of smolagents' own for sandboxes does to the class of its tool.

    It is for good otherwise: agents of other tests would save a broken one.
    """
    if hasattr(FinalAnswerTool.forward, "__source__"):
        del FinalAnswerTool.forward.__source__
