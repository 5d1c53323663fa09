"""Runs an agent offline: its model and executor answer from a recording, and check that they get the same input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from smolagents import ChatMessage, Model
from smolagents.models import ChatMessageStreamDelta, TokenUsage

from executor_api import strict_json
from executor_client._core.local import LocalPath
from executor_client.errors import InvalidRequest, RecordingError
from executor_client.recording import Recording
from executor_client.replays.comparison import Diverged, differing
from executor_client.replays.offline import RecordedClient
from executor_client.smolagents.executor import RemoteExecutor
from executor_client.smolagents.recording import json_of, record_model

_read_json = strict_json.reader()


def replay_agent(agent: Any, recording: Recording) -> None:
    """Makes an agent's model and executor answer from a recording, which must stay open.

    Raises InvalidRequest for an agent without a `RemoteExecutor`, whose session is the caller's, or that has a session.
    """
    client: Any = RecordedClient(recording)
    _executor(agent)._lease.replay(lambda: client)
    agent.model = RecordedModel(recording)


def record_agent(agent: Any, path: LocalPath) -> None:
    """Records an agent from now on, until its `cleanup`. Raises InvalidRequest as `replay_agent` does."""
    executor = _executor(agent)
    executor.record = path
    executor._lease.record_to(path)
    record_model(agent)


def _executor(agent: Any) -> RemoteExecutor:
    executor = agent.python_executor
    if not isinstance(executor, RemoteExecutor) or not executor._lease.owns_session:
        raise InvalidRequest("only an agent whose RemoteExecutor creates its sessions is recorded and replayed here")
    if executor._lease.current is not None:
        raise InvalidRequest("the agent has a session already: it is recorded or replayed from its first run on")
    return executor


class RecordedModel(Model):  # type: ignore[misc]  # smolagents is untyped
    """Answers as the recorded model did. Raises Diverged for other messages or settings than the recorded ones."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(model_id="recorded")
        self._recording = recording
        self._calls = (entry.fields for entry in recording.entries() if entry.kind == "model")
        self._number = 0

    def generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatMessage:
        self._number += 1
        what = f"call {self._number} of the model"
        call = next(self._calls, None)
        if call is None:
            raise Diverged.of(0, what, "no further call", f"a call with {len(messages)} messages")
        given = [json_of(each) for each in messages]
        recorded = [self._json(each) for each in call["messages"]]
        for number, (before, after) in enumerate(zip(recorded, given, strict=False), 1):
            if found := differing(0, f"{what}, message {number}", _lines(before), _lines(after)):
                raise Diverged(found)
        counts = (f"{len(each)} messages" for each in (recorded, given))
        settings = (_lines(each) for each in (self._json(call["settings"]), json_of({**kwargs, "args": args})))
        for aspect, pair in (("", counts), (", settings", settings)):
            if found := differing(0, what + aspect, *pair):
                raise Diverged(found)
        if "error" in call:
            raise RuntimeError(f"{call['error']['type']}: {call['error']['message']}")
        return _answer(self._json(call["answer"]))

    def generate_stream(self, messages: Any, *args: Any, **kwargs: Any) -> Iterator[ChatMessageStreamDelta]:
        answer = self.generate(messages, *args, **kwargs)
        yield ChatMessageStreamDelta(content=answer.content, token_usage=answer.token_usage)

    def _json(self, payload: Any) -> Any:
        try:
            return _read_json(self._recording.payload(payload))
        except strict_json.NotJson as error:
            raise RecordingError(f"{self._recording.path} can't be used: {error}") from error


def _lines(value: Any) -> str:
    """Returns JSON as text, in which line breaks of its strings are real line breaks."""
    return json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True).replace("\\n", "\n")


def _answer(found: dict[str, Any]) -> ChatMessage:
    usage = found.get("token_usage")
    tokens = TokenUsage(usage["input_tokens"], usage["output_tokens"]) if usage else None
    return ChatMessage.from_dict(found, token_usage=tokens)
