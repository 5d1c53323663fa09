"""Writes a recording as one HTML file, which loads nothing and runs nothing.

The page has a Content-Security-Policy without scripts. Each text is escaped, control characters and those that turn the
direction of text included. Images are decoded and written anew; HTML and SVG of the sandbox are not shown.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Iterator

from executor_client._core.short_repr import png_of
from executor_client._core.terminal import shown
from executor_client.recording import Manifest
from executor_client.replays.timeline import Frame, FrameKind, completeness, moment_text

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


def page_pieces(title: str, begin_s: float, manifest: Manifest, frames: Iterable[Frame]) -> Iterator[str]:
    """Yields the text of the page. `begin_s` is in seconds since 1970. Raises RecordingError where `frames` does."""
    style_hash = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{style_hash}'; base-uri 'none'; form-action 'none'"
    name = _safe(title)
    yield (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{name}</h1>\n"
    )
    yield f'<p class="about">Recorded {moment_text(begin_s)}. {_safe(completeness(manifest))}</p>\n'
    yield from _sections(frames)
    yield "</body>\n</html>\n"


def _sections(frames: Iterable[Frame]) -> Iterator[str]:
    step: int | None = None
    printed: list[Frame] = []  # consecutive output of one stream
    for frame in frames:
        is_output = frame.kind in (FrameKind.OUTPUT, FrameKind.ERRORS)
        if printed and not (is_output and (frame.step, frame.kind) == (printed[0].step, printed[0].kind)):
            yield _joined(printed)
            printed = []
        if frame.step != step:
            is_new = frame.kind is FrameKind.CODE
            heading = f"Step {frame.step}" if frame.step else "Session"
            yield f"<h2>{heading}{'' if is_new or not frame.step else ', continued'}</h2>\n"
            step = frame.step
        if is_output:
            printed.append(frame)
        else:
            yield _block(frame, frame.text)
    if printed:
        yield _joined(printed)


def _joined(printed: list[Frame]) -> str:
    return _block(printed[0], "".join(each.text for each in printed))


def _block(frame: Frame, text: str) -> str:
    if frame.image is not None and frame.image.pil is not None:
        data = base64.b64encode(png_of(frame.image.pil)).decode()
        content = f'<div><img alt="{_safe(text)}" src="data:image/png;base64,{data}"></div>'
    elif frame.image is not None and not frame.image.refusal:
        content = f"<pre>{_safe(f'an image was refused: {frame.image.problem}')}</pre>"
    else:
        content = f"<pre>{_safe(text.rstrip(chr(10)))}</pre>"
    return f'<div class="f {frame.kind.value}"><span>{frame.at_s:.2f} s</span>{content}</div>\n'


def _safe(text: str) -> str:
    return html.escape(shown(text))
