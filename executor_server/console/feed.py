"""The steps of a session as HTML in parts, which many viewers get as changes.

The feed is rendered once for all viewers. A viewer is only a version: `changes(version)` returns what is new since,
for htmx to swap in ("out of band"). So a slow viewer costs nothing, and skips parts that are gone meanwhile. The newest
`STEPS_MAX` steps stay, and of each the newest parts. Parts that leave the feed leave open pages, too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

STEPS_MAX = 20
PARTS_MAX = 200
"""Parts of one step, in addition to its head, code and end."""
STEP_CHARS_MAX = 256 * 1024
"""Characters of the HTML of one step's parts."""
REMOVED_MAX = 1_000
"""Removed parts that are remembered. A viewer that has missed more gets everything again."""


@dataclass(eq=False)
class Part:
    """A piece of HTML in an element of its own. Versions say when it was made and last changed."""

    number: int
    tag: str
    html: str
    made: int
    changed: int
    is_dropped: bool = False

    def element(self, swap: str = "") -> str:
        swap = f' hx-swap-oob="{swap}"' if swap else ""
        return f'<{self.tag} id="part-{self.number}"{swap}>{self.html}</{self.tag}>'


@dataclass(eq=False)
class Step:
    """One execution: its head, its code, notes on what is missing, its parts, and its end."""

    head: Part
    code: Part
    notes: Part
    end: Part
    parts: deque[Part] = field(default_factory=deque)
    chars: int = 0
    dropped: int = 0
    """Parts that are no longer here."""

    def element(self) -> str:
        parts = "".join(part.element() for part in self.parts)
        return (
            f'<li id="step-{self.head.number}">{self.head.element()}{self.code.element()}{self.notes.element()}'
            f'<div class="parts" id="parts-{self.head.number}">{parts}</div>{self.end.element()}</li>'
        )


class Feed:
    """The parts of one session, and the changes since any version."""

    def __init__(self) -> None:
        self.version = 0
        self._numbers = 0
        self._removed: deque[tuple[int, int, str]] = deque(maxlen=REMOVED_MAX)  # when it was made, removed; its id
        self.steps: deque[Step] = deque()
        self._made_at = 0
        self._made: dict[int, str] = {}  # by `since`, the changes up to the version `_made_at`
        self.panel = self._part("div", "")
        """The state of the session, next to its steps."""
        self.note = self._part("div", "")
        """Above the steps."""

    # -- writing -------------------------------------------------------------------------------------------------

    def begin(self) -> Step:
        """Adds a step."""
        code, notes, end = (self._part("div", "") for _ in range(3))
        step = Step(self._part("header", ""), code, notes, end)
        self.steps.append(step)
        if len(self.steps) > STEPS_MAX:
            self.remove(self.steps[0])
        return step

    def remove(self, step: Step) -> None:
        """Removes a step."""
        self.steps.remove(step)
        self._remove(step.head.made, f"step-{step.head.number}")

    def add(self, step: Step, html: str) -> Part:
        """Adds a part to a step."""
        part = self._part("div", html)
        step.parts.append(part)
        step.chars += len(html)
        while len(step.parts) > PARTS_MAX or (step.chars > STEP_CHARS_MAX and len(step.parts) > 1):
            gone = step.parts.popleft()
            gone.is_dropped = True
            step.chars -= len(gone.html)
            step.dropped += 1
            self._remove(gone.made, f"part-{gone.number}")
        return part

    def replace(self, part: Part, html: str, step: Step | None = None) -> None:
        """Changes a part, if it is still there and differs. `step` is the one whose parts it is among."""
        if part.is_dropped or part.html == html:
            return
        if step is not None:
            step.chars += len(html) - len(part.html)
        part.html = html
        part.changed = self._next()

    def _part(self, tag: str, html: str) -> Part:
        self._numbers += 1
        version = self._next()
        return Part(self._numbers, tag, html, version, version)

    def _next(self) -> int:
        self.version += 1
        return self.version

    def _remove(self, made: int, element_id: str) -> None:
        self._removed.append((made, self._next(), element_id))

    # -- reading -------------------------------------------------------------------------------------------------

    def whole(self) -> str:
        """Returns all steps."""
        return "".join(step.element() for step in self.steps)

    def changes(self, since: int) -> str:
        """Returns the HTML that takes a page from a version to the present one; since 0: whatever the page has.

        Viewers that have the same version share the text, which may have megabytes.
        """
        if self._made_at != self.version:
            self._made_at, self._made = self.version, {}
        if since not in self._made:
            self._made[since] = self._changes(since)
        return self._made[since]

    def _changes(self, since: int) -> str:
        forgotten = self._removed[0][1] if len(self._removed) == REMOVED_MAX else 0
        pieces = [part.element("true") for part in (self.panel, self.note) if part.changed > since]
        if since < forgotten or since == 0:
            return "".join([*pieces, f'<div id="steps" hx-swap-oob="innerHTML">{self.whole()}</div>'])
        for made, removed, element_id in self._removed:
            if made <= since < removed:
                pieces.append(f'<div id="{element_id}" hx-swap-oob="delete"></div>')
        for step in self.steps:
            if step.head.made > since:
                pieces.append(f'<div hx-swap-oob="beforeend:#steps">{step.element()}</div>')
                continue
            kept = (step.head, step.code, step.notes, step.end, *step.parts)
            pieces += [part.element("true") for part in kept if part.made <= since < part.changed]
            if new := [part.element() for part in step.parts if part.made > since]:
                pieces.append(f'<div hx-swap-oob="beforeend:#parts-{step.head.number}">{"".join(new)}</div>')
        return "".join(pieces)
