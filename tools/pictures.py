"""Draws the pictures of docs/pictures: each NAME.svg from NAME.toml beside it.

    python tools/pictures.py [--check]

`--check` writes nothing, and fails when a picture is not what would be drawn. There are two kinds. A *map* has zones,
boxes and arrows at coordinates that the source gives. A *sequence* has actors side by side and steps from top to
bottom, whose places follow from their order. A text that does not fit its box is an error.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from pages import write_or_check

PICTURES = Path(__file__).parents[1] / "docs/pictures"

# Fill and line of a zone or of an actor's head.
COLOURS = {"blue": ("#eaf2fb", "#5f8cc0"), "green": ("#ebf7ef", "#5d9b74"), "red": ("#fdefeb", "#c07a66")}
INK, LINE = "#1f2933", "#52606d"
FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"
# Width of an average character of a text of 1 px; Helvetica's, and no fonts are read.
CHAR_PX = 0.5
TITLE_PX, TEXT_PX, LABEL_PX = 13, 11.5, 11
LINE_HEIGHT_PX = 15
STEP_PX, HEAD_PX = 30, 30


class Misfit(Exception):
    """A text is wider than its place."""


def text(x: float, y: float, words: str, *, px: float, bold: bool = False, anchor: str = "middle") -> str:
    """One line of text whose baseline is at y."""
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{px:g}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'


def rectangle(at: Iterable[float], *, fill: str, line: str, radius: float = 8) -> str:
    x, y, width, height = at
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
        f'fill="{fill}" stroke="{line}"/>'
    )


def polyline(
    points: list[tuple[float, float]], *, both: bool = False, dashed: bool = False, strong: bool = False
) -> str:
    """An arrow through the points; its head is at the last, or at both ends."""
    places = " ".join(f"{x:g},{y:g}" for x, y in points)
    style = ' stroke-dasharray="5 4"' if dashed else ""
    start = ' marker-start="url(#head)"' if both else ""
    width = 2 if strong else 1.2
    return (
        f'<polyline points="{places}" fill="none" stroke="{LINE}" stroke-width="{width}"{style}{start} '
        'marker-end="url(#head)"/>'
    )


def fit(words: str, px: float, room: float) -> None:
    """Raises Misfit for a text that is wider than `room`."""
    needed = len(words) * px * CHAR_PX
    if needed > room:
        raise Misfit(f"{words!r} needs about {needed:.0f} px and has {room:.0f}")


# ---------------------------------------------------------------------------------------------------------------------
# Maps


def draw_map(source: dict[str, Any]) -> tuple[list[str], float]:
    """The elements of a map, and its height."""
    drawn = []
    for zone in source["zone"]:
        x, y, width, _ = zone["at"]
        fill, line = COLOURS[zone["colour"]]
        fit(zone["title"], TITLE_PX, width - 16)
        drawn.append(rectangle(zone["at"], fill=fill, line=line, radius=12))
        drawn.append(text(x + width / 2, y + 24, zone["title"], px=TITLE_PX, bold=True))
    boxes = {box["name"]: box for box in source["box"]}
    for box in boxes.values():
        drawn += _box(box)
    for arrow in source["arrow"]:
        drawn += _arrow(arrow, boxes)
    return drawn, source["height"]


def _box(box: dict[str, Any]) -> Iterator[str]:
    x, y, width, height = box["at"]
    yield rectangle(box["at"], fill="#ffffff", line=LINE)
    first = y + height / 2 - (len(box["lines"]) - 1) * LINE_HEIGHT_PX / 2 + 4
    for number, words in enumerate(box["lines"]):
        fit(words, TEXT_PX, width - 12)
        yield text(x + width / 2, first + number * LINE_HEIGHT_PX, words, px=TEXT_PX, bold=number == 0)


def _arrow(arrow: dict[str, Any], boxes: dict[str, Any]) -> Iterator[str]:
    points = [_point(place, boxes) for place in arrow["path"]]
    options = {name: arrow.get(name, False) for name in ("both", "dashed", "strong")}
    yield polyline(points, **options)
    labels = arrow.get("label", [])
    (x1, y1), (x2, y2) = points[0], points[-1]
    if x1 == x2:  # beside an upright arrow
        for number, words in enumerate(labels):
            yield text(x1 + 8, (y1 + y2) / 2 + 4 + number * 14, words, px=LABEL_PX, anchor="start")
    else:  # the last label below a level arrow, the others above
        for number, words in enumerate(labels):
            below = number == len(labels) - 1 and len(labels) > 1
            y = y1 + 16 if below else y1 - 8 - (max(len(labels) - 2, 0) - number) * 14
            fit(words, LABEL_PX, abs(x2 - x1) + 4)
            yield text((x1 + x2) / 2, y, words, px=LABEL_PX)


def _point(place: str | list[float], boxes: dict[str, Any]) -> tuple[float, float]:
    """The point of a place: coordinates, or `box.side`, where a side may be a corner such as `bottom-left`."""
    if not isinstance(place, str):
        return place[0], place[1]
    name, side = place.split(".")
    x, y, width, height = boxes[name]["at"]
    across = 0.0 if "left" in side else 1.0 if "right" in side else 0.5
    down = 0.0 if "top" in side else 1.0 if "bottom" in side else 0.5
    if "-" in side:  # a little inside of the corner, where the outline is round
        across += 0.06 if across == 0 else -0.06
    return x + across * width, y + down * height


# ---------------------------------------------------------------------------------------------------------------------
# Sequences


def draw_sequence(source: dict[str, Any]) -> tuple[list[str], float]:
    """The elements of a sequence, and its height."""
    actors, steps, width = source["actor"], source["step"], source["width"]
    room = width / len(actors)
    middle = {actor["name"]: room * (number + 0.5) for number, actor in enumerate(actors)}
    height = 10 + HEAD_PX + STEP_PX * (len(steps) + 0.6) + 10
    drawn = []
    for actor in actors:
        fill, line = COLOURS[actor["colour"]]
        x = middle[actor["name"]]
        fit(actor["title"], TITLE_PX, room - 16)
        drawn.append(f'<line x1="{x:g}" y1="{10 + HEAD_PX}" x2="{x:g}" y2="{height - 10:g}" stroke="{line}"/>')
        drawn.append(rectangle((x - room / 2 + 6, 10, room - 12, HEAD_PX), fill=fill, line=line))
        drawn.append(text(x, 30, actor["title"], px=TITLE_PX, bold=True))
    for number, step in enumerate(steps, 1):
        y = 10 + HEAD_PX + STEP_PX * (number + 0.1)
        drawn += _note(step, middle, y, width) if "at" in step else _message(step, middle, y, width)
    return drawn, height


def _note(step: dict[str, Any], middle: dict[str, float], y: float, width: float) -> Iterator[str]:
    """A box over the line of one actor, which does something by itself."""
    needed = len(step["text"]) * LABEL_PX * CHAR_PX + 20
    left = min(max(middle[step["at"]] - needed / 2, 4), width - needed - 4)
    yield rectangle((left, y - 17, needed, 22), fill="#fff8e1", line="#b8a25a", radius=4)
    yield text(left + needed / 2, y - 2, step["text"], px=LABEL_PX)


def _message(step: dict[str, Any], middle: dict[str, float], y: float, width: float) -> Iterator[str]:
    """A message: an arrow, with its text on a white ground so that the lines of actors don't cross it."""
    start, end = middle[step["from"]], middle[step["to"]]
    needed = len(step["text"]) * LABEL_PX * CHAR_PX + 8
    centre = min(max((start + end) / 2, needed / 2 + 2), width - needed / 2 - 2)
    yield f'<rect x="{centre - needed / 2:g}" y="{y - 15:g}" width="{needed:g}" height="13" fill="#ffffff"/>'
    yield polyline([(start, y), (end, y)], dashed=step.get("reply", False))
    yield text(centre, y - 5, step["text"], px=LABEL_PX)


# ---------------------------------------------------------------------------------------------------------------------


def picture(source: dict[str, Any]) -> str:
    """The SVG of a source. Raises Misfit."""
    drawn, height = {"map": draw_map, "sequence": draw_sequence}[source["kind"]](source)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {source["width"]:g} {height:g}" '
        f'width="{source["width"]:g}" height="{height:g}" role="img" font-family="{FONT}" fill="{INK}">'
    )
    marker = (
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
        f'<path d="M0,0 L10,5 L0,10 z" fill="{LINE}"/></marker></defs>'
    )
    titles = f"<title>{escape(source['title'])}</title>\n<desc>{escape(source['description'])}</desc>"
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([head, titles, marker, ground, *drawn, "</svg>", ""])


def main() -> None:
    for source in sorted(PICTURES.glob("*.toml")):
        try:
            drawn = picture(tomllib.loads(source.read_text()))
        except Misfit as error:
            sys.exit(f"{source.name}: {error}")
        write_or_check(source.with_suffix(".svg"), drawn)


if __name__ == "__main__":
    main()
