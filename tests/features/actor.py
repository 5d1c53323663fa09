"""The model of the probes: plays a script, and counts the images that it was shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import PIL.Image

from examples.scripted import Reply, ScriptedModel


class Actor(ScriptedModel):
    """`image_counts` says how many images came with each question."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        super().__init__(replies)
        self.image_counts: list[int] = []

    @classmethod
    def of(cls, *script: str | Reply) -> Self:
        return cls([each if isinstance(each, Reply) else Reply("", each) for each in script])

    def generate(self, messages: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        self.image_counts.append(sum(_images(message) for message in messages))
        return super().generate(messages, *args, **kwargs)


def _images(message: Any) -> int:
    parts = message.content if isinstance(message.content, list) else []
    return sum(isinstance(part.get("image"), PIL.Image.Image) for part in parts)
