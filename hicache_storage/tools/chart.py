"""Line charts as self-contained SVG, readable on light and dark backgrounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 340, 260
LEFT, TOP, RIGHT, BOTTOM = 56, 36, 12, 40
LEGEND_LINE: Final = 18
COLOURS: Final = ("#3b7dd8", "#d9822b", "#2e9e6b", "#b354c4", "#c8453c", "#7f8a1e", "#5a8fa8")
STYLE: Final = """
text { font: 12px system-ui, sans-serif; fill: #444 }
.title { font-weight: 600; font-size: 13px }
.axis { stroke: #888; fill: none }
.grid { stroke: #8884 }
@media (prefers-color-scheme: dark) { text { fill: #ccc } }
"""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart."""

    title: str
    places: Sequence[str]
    """Names along the horizontal axis, at equal distances."""
    lines: Mapping[str, Mapping[str, tuple[float, ...]]]
    """By line and place: a value, and the smallest and the largest that it was measured at."""
    marks: Sequence[float]
    """Values with a line across the panel, the first and the last of them at its edges; what lies
    beyond is drawn there."""
    logarithmic: bool = False

    def height_of(self, value: float) -> float:
        """Return the distance of a value from the upper edge of the drawing."""
        kept = min(max(value, self.marks[0]), self.marks[-1])
        low, at, high = (
            (math.log(each) if self.logarithmic else each)
            for each in (self.marks[0], kept, self.marks[-1])
        )
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (at - low) / (high - low)

    def distance_of(self, place: str) -> float:
        """Return the distance of a place from the left edge of the panel."""
        step = (WIDTH - LEFT - RIGHT) / len(self.places)
        return LEFT + step * (self.places.index(place) + 0.5)


def quarters(largest: float) -> list[float]:
    """Return marks from zero to a short number that is not below `largest`."""
    power = 10.0 ** math.floor(math.log10(largest)) if largest > 0 else 1.0
    top = next((step * power for step in (1, 2, 4, 8) if largest <= step * power), 10 * power)
    return [top * step / 4 for step in range(5)]


def draw(title: str, panels: Sequence[Panel]) -> str:
    """Draw panels side by side, above a legend; a line has the same colour in each."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    width, height = WIDTH * len(panels), HEIGHT + LEGEND_LINE * (len(names) + 1)
    svg = ET.Element(
        "svg",
        {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width} {height}", "role": "img"},
    )
    _add(svg, "title").text = title
    _add(svg, "style").text = STYLE
    for index, panel in enumerate(panels):
        _draw_panel(_add(svg, "g", transform=f"translate({index * WIDTH},0)"), panel, names)
    for index, name in enumerate(names):
        y = HEIGHT + LEGEND_LINE * (index + 1)
        _stroke(_add(svg, "line", x1=LEFT, x2=LEFT + 24, y1=y - 4, y2=y - 4), index)
        _text(svg, LEFT + 32, y, name)
    return ET.tostring(svg, encoding="unicode") + "\n"


def _draw_panel(group: ET.Element, panel: Panel, names: list[str]) -> None:
    _text(group, LEFT, 20, panel.title, kind="title")
    for mark in panel.marks:
        y = panel.height_of(mark)
        _add(group, "line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, kind="grid")
        _text(group, LEFT - 6, y + 4, f"{mark:,g}", anchor="end")
    for place in panel.places:
        _text(group, panel.distance_of(place), HEIGHT - BOTTOM + 18, place, anchor="middle")
    for index, name in enumerate(names):
        # Side by side, so that the bars of several lines do not cover each other.
        shift = 4 * (index - (len(names) - 1) / 2)
        points = [
            (panel.distance_of(place) + shift, [panel.height_of(value) for value in values])
            for place in panel.places
            if (values := panel.lines.get(name, {}).get(place))
        ]
        for x, (y, *spread) in points:
            if spread:
                bar = _add(group, "line", x1=x, x2=x, y1=spread[0], y2=spread[1], opacity=0.5)
                _stroke(bar, index)
            _add(group, "circle", cx=x, cy=y, r=3, fill=COLOURS[index % len(COLOURS)])
        corners = " ".join(f"{x:.1f},{heights[0]:.1f}" for x, heights in points)
        if points:
            _stroke(_add(group, "polyline", points=corners, fill="none"), index)
    _add(group, "path", d=f"M{LEFT},{TOP} V{HEIGHT - BOTTOM} H{WIDTH - RIGHT}", kind="axis")


def _stroke(line: ET.Element, index: int) -> None:
    line.set("stroke", COLOURS[index % len(COLOURS)])
    line.set("stroke-width", "2")
    # Colours begin again, so that lines have to differ otherwise.
    if index >= len(COLOURS):
        line.set("stroke-dasharray", "5 3")


def _text(
    parent: ET.Element, x: float, y: float, text: str, *, kind: str = "", anchor: str = "start"
) -> None:
    _add(parent, "text", x=x, y=y, text_anchor=anchor, kind=kind).text = text


def _add(parent: ET.Element, tag: str, *, kind: str = "", **attributes: str | float) -> ET.Element:
    """Add an element; `kind` is its CSS class, and underscores stand for hyphens."""
    written = {
        name.replace("_", "-"): f"{value:.1f}".removesuffix(".0")
        if isinstance(value, float)
        else str(value)
        for name, value in attributes.items()
    }
    # `class` is a keyword of Python, so that it cannot be an argument.
    return ET.SubElement(parent, tag, written | ({"class": kind} if kind else {}))
