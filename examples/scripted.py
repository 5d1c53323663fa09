"""A model for smolagents that plays the language model from a script: no network, the same every time.

It is a strict actor: before each reply it reads the observation of the step before, fails when something that the
script relies on is not in it, and fills what it reads there into its next code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smolagents import ChatMessage, Model
from smolagents.models import (
    ChatMessageStreamDelta,
    ChatMessageToolCall,
    ChatMessageToolCallFunction,
    MessageRole,
)


class ScriptError(Exception):
    """An observation is not what the script needs; smolagents ends the run for it."""


@dataclass(frozen=True)
class Reply:
    """One reply of the model: a thought, and code or calls of tools; a thought alone, when a plan is asked for.

    Each of `expects` must be in the observation. Each of `reads` is a pattern with one group, found in the
    observation; what the group holds takes the place of `<<name>>` in thought, code and arguments. `calls` are for a
    `ToolCallingAgent`: the names of tools, each with its arguments.
    """

    thought: str
    code: str = ""
    expects: Sequence[str] = ()
    reads: Mapping[str, str] = field(default_factory=dict)
    calls: Sequence[tuple[str, Mapping[str, str]]] = ()


class ScriptedModel(Model):  # type: ignore[misc]  # smolagents is untyped
    """Gives its replies in order. `finished` tells whether all were given."""

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
        """The same, a line at a time; for replies without `calls`."""
        for line in self.generate(messages).content.splitlines(keepends=True):
            yield ChatMessageStreamDelta(content=line)


def _last_observation(messages: Sequence[Any], said: str) -> str:
    """All the text that came after the model's own last words; with them, where somebody has changed them."""
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
    """What a reply reads in an observation, ready to be filled into its text."""

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

    def __call__(self, text: str) -> str:
        for name, value in self._found.items():
            text = text.replace(f"<<{name}>>", value)
        return text
