"""Records an agent's calls of its model, in the recording of its executor.

An object that passes everything on replaces the agent's model. The model itself is unchanged: it may serve other agents
that are not recorded.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import PIL.Image
from smolagents.models import agglomerate_stream_deltas

from executor_api.recordings import fields_of
from executor_client.recording import Recorder, packed_json
from executor_client.smolagents.executor import RemoteExecutor

_NOT_RECORDED = "raw"
"""A field of an answer: the object of the provider's library."""


def record_model(agent: Any) -> None:
    """Makes calls of the agent's model part of its executor's recording, if there is one. Idempotent."""
    executor = agent.python_executor
    if isinstance(executor, RemoteExecutor) and executor.record and not isinstance(agent.model, _RecordedModel):
        # smolagents shows the name of the model's class.
        agent.model = type(type(agent.model).__name__, (_RecordedModel,), {})(agent.model, executor)


def json_of(value: Any) -> Any:
    """Returns the input or answer of a model as JSON: dataclasses as objects, images by the hash of their pixels.

    Any other value becomes the name of its type: its text may hold an address, and differ from run to run.
    """
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return json_of(value.value)
    if isinstance(value, Mapping):
        return {str(name): json_of(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_of(each) for each in value]
    if isinstance(value, PIL.Image.Image):
        return {"image": [value.mode, *value.size], "sha256": hashlib.sha256(value.tobytes()).hexdigest()}
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if field.name != _NOT_RECORDED]
        return {name: json_of(getattr(value, name)) for name in fields}
    return f"<{type(value).__name__}>"


class _RecordedModel:
    """Passes everything on to a model, and records the calls that generate text."""

    def __init__(self, model: Any, executor: RemoteExecutor) -> None:
        self._recorded_model, self._recorded_by = model, executor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_recorded_"):  # a copy, whose `__init__` did not run
            raise AttributeError(name)
        found = getattr(self._recorded_model, name)
        if name == "generate":
            return functools.partial(self._generate, found)
        if name == "generate_stream":
            return functools.partial(self._generate_stream, found)
        return found

    @property  # type: ignore[misc]  # so isinstance still finds the model's class
    def __class__(self) -> Any:
        return type(self._recorded_model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._generate(self._recorded_model, *args, **kwargs)

    def _generate(self, call: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
        with self._recorded(messages, {**kwargs, "args": args}) as answers:
            answer = call(messages, *args, **kwargs)
            answers.append(answer)
            return answer

    def _generate_stream(self, call: Any, messages: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with self._recorded(messages, {**kwargs, "args": args}) as answers:
            deltas = []
            for delta in call(messages, *args, **kwargs):
                deltas.append(delta)
                yield delta
            answers.append(agglomerate_stream_deltas(deltas))

    @contextmanager
    def _recorded(self, messages: Any, settings: dict[str, Any]) -> Iterator[list[Any]]:
        """Adds one call to the recording, with the answer that is put into the list."""
        recorder = self._recorded_by.recorder
        if recorder is None:
            yield []
            return
        # The messages are stored before the call, because the agent may change them later.
        fields: dict[str, Any] = {
            "model": str(getattr(self._recorded_model, "model_id", None) or type(self._recorded_model).__name__),
            "messages": [_stored(recorder, json_of(each)) for each in messages],
            "settings": _stored(recorder, json_of(settings)),
        }
        began_s = time.monotonic()
        answers: list[Any] = []
        try:
            yield answers
            fields["answer"] = _stored(recorder, json_of(answers[0]))
        except BaseException as error:
            fields["error"] = {"type": type(error).__name__, "message": str(error)}
            raise
        finally:
            recorder.add("model", {**fields, "duration_s": round(time.monotonic() - began_s, 6)})


def _stored(recorder: Recorder, value: Any) -> dict[str, Any]:
    """Stores a message. Each one is a blob, once in the file, though every later request repeats it."""
    return fields_of(recorder.payload(packed_json(value)))
