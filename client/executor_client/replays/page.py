"""Writes a recording, or a session, as one HTML file, which loads nothing and runs nothing.

The page has a Content-Security-Policy without scripts. Each text is escaped, including control characters and those
that change the direction of text. Images are decoded and encoded again; HTML and SVG of the sandbox are not shown.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Iterator

from executor_client._core.short_repr import png_of
from executor_client._core.terminal import shown
from executor_client.replays.timeline import Frame, FrameKind

_STYLE = """
:root { color-scheme: light dark; --line: light-dark(#d0d7de, #3d444d); --dim: light-dark(#59636e, #9198a1);
  --code: light-dark(#f6f8fa, #151b23); --red: light-dark(#b3261e, #ff8a80); --call: light-dark(#7a2e8e, #d8a2e8); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
.f { display: grid; grid-template-columns: 5.5rem 1fr; gap: .75rem; margin: .25rem 0; }
.f > span { color: var(--dim); text-align: right; font: .8rem/1.9 ui-monospace, monospace; }
pre { margin: 0; font: .9rem/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  unicode-bidi: isolate; direction: ltr; min-width: 0; }
.code pre { background: var(--code); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; }
.errors pre, .failure pre { color: var(--red); } .call pre, .answer pre { color: var(--call); }
.note pre, .end pre, .about { color: var(--dim); }
img { max-width: 100%; background: #fff; border: 1px solid var(--line); }
@media (max-width: 40rem) { .f { grid-template-columns: 1fr; gap: 0; } .f > span { text-align: left; } }
"""


def page_pieces(title: str, about: str, frames: Iterable[Frame]) -> Iterator[str]:
    """Yields the text of the page; `about` is its first line. Raises RecordingError where `frames` does."""
    page = Page()
    yield page.begin(title, about)
    for frame in frames:
        yield page.add(frame)
    yield page.end()


class Page:
    """Writes frames, one after the other, as the text of a page."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._newest = 0  # step
        self._time = ""
        self._printed: list[Frame] = []  # consecutive output of one stream

    def begin(self, title: str, about: str) -> str:
        """Returns the page up to its first frame."""
        style_hash = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
        policy = (
            f"default-src 'none'; img-src data:; style-src 'sha256-{style_hash}'; base-uri 'none'; form-action 'none'"
        )
        name = _safe(title)
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{name}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{name}</h1>\n"
            f'<p class="about">{_safe(about)}</p>\n'
        )

    def add(self, frame: Frame) -> str:
        """Returns the text for the next frame; output is held back until other frames come."""
        is_output = frame.kind in (FrameKind.OUTPUT, FrameKind.ERRORS)
        text = ""
        if self._printed and not (is_output and _source(frame) == _source(self._printed[0])):
            text = self._joined()
        if frame.step != self._step:
            heading = f"Step {frame.step}" if frame.step else "Session"
            is_continued = 0 < frame.step <= self._newest
            text += f"<h2>{heading}{', continued' if is_continued else ''}</h2>\n"
            self._step, self._newest = frame.step, max(frame.step, self._newest)
        if is_output:
            self._printed.append(frame)
            return text
        return text + self._block(frame, frame.text)

    def end(self) -> str:
        """Returns the rest of the page."""
        return (self._joined() if self._printed else "") + "</body>\n</html>\n"

    def _joined(self) -> str:
        printed, self._printed = self._printed, []
        return self._block(printed[0], "".join(each.text for each in printed))

    def _block(self, frame: Frame, text: str) -> str:
        if frame.image is not None and frame.image.pil is not None:
            data = base64.b64encode(png_of(frame.image.pil)).decode()
            content = f'<div><img alt="{_safe(text)}" src="data:image/png;base64,{data}"></div>'
        elif frame.image is not None and not frame.image.refusal:
            content = f"<pre>{_safe(f'an image was refused: {frame.image.problem}')}</pre>"
        else:
            content = f"<pre>{_safe(text.rstrip(chr(10)))}</pre>"
        before, self._time = self._time, f"{frame.at_s:.2f} s"
        shown = "" if self._time == before else self._time
        return f'<div class="f {frame.kind.value}"><span>{shown}</span>{content}</div>\n'


def _source(frame: Frame) -> tuple[int, FrameKind]:
    return frame.step, frame.kind


def _safe(text: str) -> str:
    return html.escape(shown(text))
