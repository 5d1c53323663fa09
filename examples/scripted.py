"""A model for smolagents that replies from a script instead of a language model: without network, always the same.

Before each reply it reads the observation of the previous step, fails if a text that the script expects is missing, and
fills values from it into the next code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smolagents import ChatMessage, Model
from smolagents.models import ChatMessageStreamDelta, ChatMessageToolCall, ChatMessageToolCallFunction, MessageRole


class ScriptError(Exception):
    """An observation lacks a text that the script expects. smolagents ends the run."""


@dataclass(frozen=True)
class Reply:
    """One reply of the model: a thought with code or tool calls; a thought alone as an answer to a request for a plan.

    Each of `expects` must be in the observation. Each of `reads` is a pattern with one group that must match in it; the
    group's text replaces `<<name>>` in thought, code and arguments. `calls` are for a `ToolCallingAgent`: names of
    tools, each with its arguments.
    """

    thought: str
    code: str = ""
    expects: Sequence[str] = ()
    reads: Mapping[str, Any] = field(default_factory=dict)
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()


class ScriptedModel(Model):  # type: ignore[misc]  # smolagents is untyped
    """Gives its replies in order. `finished` is True after the last one."""

    def __init__(self, replies: Sequence[Reply], model_id: str = "scripted") -> None:
        super().__init__(model_id=model_id)
        self._replies = list(replies)
        self._given = 0
        self._said = ""

    @property
    def finished(self) -> bool:
        return self._given == len(self._replies)

    def generate(self, messages: Sequence[Any], *args: Any, **kwargs: Any) -> ChatMessage:
        if self.finished:
            raise ScriptError(f"the script of {self.model_id} has {len(self._replies)} replies and was asked for more")
        reply = self._replies[self._given]
        self._given += 1
        fill = _Filling(reply, _last_observation(messages, self._said))
        content = fill(reply.thought)
        if reply.code:
            content = f"Thought: {content}\n<code>\n{fill(reply.code.strip())}\n</code>"
        self._said = content
        calls = [
            ChatMessageToolCall(
                ChatMessageToolCallFunction({key: fill(value) for key, value in arguments.items()}, name),
                id=f"call_{self._given}_{number}",
                type="function",
            )
            for number, (name, arguments) in enumerate(reply.calls)
        ]
        return ChatMessage(role=MessageRole.ASSISTANT, content=content, tool_calls=calls or None)

    def generate_stream(self, messages: Sequence[Any], *args: Any, **kwargs: Any) -> Iterator[ChatMessageStreamDelta]:
        """Yields a reply line by line; for replies without `calls`."""
        for line in self.generate(messages).content.splitlines(keepends=True):
            yield ChatMessageStreamDelta(content=line)


def _last_observation(messages: Sequence[Any], said: str) -> str:
    """Returns all text after the model's last reply, and that reply too if it was changed meanwhile."""
    texts: list[str] = []
    for message in reversed(messages):
        if message.role == MessageRole.TOOL_CALL:  # smolagents repeats in it what the model wrote
            continue
        content = message.content if isinstance(message.content, list) else [{"type": "text", "text": message.content}]
        text = "\n".join(part["text"] for part in content if part["type"] == "text")
        if message.role == MessageRole.ASSISTANT and said and said in text:
            break
        texts.append(text)
        if message.role == MessageRole.ASSISTANT:
            break
    return "\n".join(reversed(texts))


class _Filling:
    """Reads the values of a reply from an observation, and fills them into its text."""

    def __init__(self, reply: Reply, observation: str) -> None:
        for expected in reply.expects:
            if expected not in observation:
                raise ScriptError(f"{expected!r} is not in the observation:\n{observation}")
        self._found: dict[str, str] = {}
        for name, pattern in reply.reads.items():
            found = re.search(pattern, observation)
            if found is None:
                raise ScriptError(f"nothing like {pattern!r} is in the observation:\n{observation}")
            self._found[name] = found[1]

    def __call__(self, text: Any) -> Any:
        """Fills the values into a text; anything else stays as it is."""
        if not isinstance(text, str):
            return text
        for name, value in self._found.items():
            text = text.replace(f"<<{name}>>", value)
        return text
