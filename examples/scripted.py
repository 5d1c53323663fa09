"""A model for smolagents that plays the language model from a script: no network, the same every time.

It is a strict actor: before each reply it reads the observation of the step before, fails when something that the
script relies on is not in it, and fills what it reads there into its next code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smolagents import ChatMessage, Model
from smolagents.models import MessageRole


class ScriptError(Exception):
    """An observation is not what the script needs; smolagents ends the run for it."""


@dataclass(frozen=True)
class Reply:
    """One reply of the model.

    Each of `expects` must be in the observation. Each of `reads` is a pattern with one group, found in the
    observation; what the group holds takes the place of `<<name>>` in the code.
    """

    thought: str
    code: str
    expects: Sequence[str] = ()
    reads: Mapping[str, str] = field(default_factory=dict)


class ScriptedModel(Model):  # type: ignore[misc]  # smolagents is untyped
    """Gives its replies in order. `finished` tells whether all were given."""

    def __init__(self, replies: Sequence[Reply], model_id: str = "scripted") -> None:
        super().__init__(model_id=model_id)
        self._replies = list(replies)
        self._given = 0

    @property
    def finished(self) -> bool:
        return self._given == len(self._replies)

    def generate(self, messages: Sequence[Any], *args: Any, **kwargs: Any) -> ChatMessage:
        if self.finished:
            raise ScriptError(f"the script of {self.model_id} has {len(self._replies)} replies and was asked for more")
        reply = self._replies[self._given]
        self._given += 1
        code = _fill(reply, _last_observation(messages))
        return ChatMessage(role=MessageRole.ASSISTANT, content=f"Thought: {reply.thought}\n<code>\n{code}\n</code>")


def _last_observation(messages: Sequence[Any]) -> str:
    """All the text that came after the model's own last words."""
    texts: list[str] = []
    for message in reversed(messages):
        if message.role == MessageRole.ASSISTANT:
            break
        content = message.content if isinstance(message.content, list) else [{"type": "text", "text": message.content}]
        texts.extend(part["text"] for part in content if part["type"] == "text")
    return "\n".join(reversed(texts))


def _fill(reply: Reply, observation: str) -> str:
    for expected in reply.expects:
        if expected not in observation:
            raise ScriptError(f"{expected!r} is not in the observation:\n{observation}")
    code = reply.code.strip()
    for name, pattern in reply.reads.items():
        found = re.search(pattern, observation)
        if found is None:
            raise ScriptError(f"nothing like {pattern!r} is in the observation:\n{observation}")
        code = code.replace(f"<<{name}>>", found[1])
    return code
