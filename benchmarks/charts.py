"""Line charts in SVG for the documents: panels side by side, each with a log scale and one legend for
all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COLOURS: Final = (
    "#0b6e4f",
    "#3d5a80",
    "#98c1d9",
    "#c8553d",
    "#8d6a9f",
    "#d9822b",
    "#7f8a1e",
    "#555",
)
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, LEGEND = 330, 300, 44, 40, 36, 18


@dataclass(frozen=True)
class Panel:
    """One chart."""

    title: str
    places: Sequence[str]
    """Names along the horizontal axis, at equal distances."""
    lines: Mapping[str, Mapping[str, float]]
    """Value of each line at some of the places."""
    marks: Sequence[float]
    """Values with a line across the panel."""
    lowest: float
    """Value at the lower edge; what lies below is drawn there."""
    highest: float

    def height_of(self, value: float) -> float:
        """Distance of a value from the upper edge of the drawing."""
        span = math.log(self.highest / self.lowest)
        kept = min(max(value, self.lowest), self.highest)
        part = math.log(kept / self.lowest) / span
        return HEIGHT - BOTTOM - part * (HEIGHT - BOTTOM - TOP)


def draw(panels: Sequence[Panel]) -> str:
    """Draw panels; a line has the same colour in each."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    svg = ET.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {WIDTH * len(panels)} {HEIGHT + LEGEND * len(names)}",
            "font-family": "sans-serif",
            "font-size": "11",
        },
    )
    ET.SubElement(svg, "rect", width="100%", height="100%", fill="white")
    for number, panel in enumerate(panels):
        _draw_panel(svg, panel, WIDTH * number + LEFT, colours)
    for number, (name, colour) in enumerate(colours.items()):
        y = HEIGHT + LEGEND * number
        ET.SubElement(svg, "rect", x=str(LEFT), y=f"{y - 8}", width="16", height="8", fill=colour)
        _text(svg, LEFT + 24, y, name.replace("`", ""))
    return ET.tostring(svg, encoding="unicode") + "\n"


def _draw_panel(svg: ET.Element, panel: Panel, left: float, colours: Mapping[str, str]) -> None:
    _text(svg, left, 20, panel.title)
    for value in panel.marks:
        y = panel.height_of(value)
        line = {"x1": left, "x2": left + WIDTH - LEFT - 12, "y1": y, "y2": y}
        stroke = "#888" if value == 1.0 else "#ddd"
        ET.SubElement(svg, "line", {k: f"{v:.1f}" for k, v in line.items()} | {"stroke": stroke})
        _text(svg, left - 38, y + 4, f"{value:,g}")
    step = (WIDTH - LEFT - 61) / max(len(panel.places) - 1, 1)
    across = {place: left + 20 + step * number for number, place in enumerate(panel.places)}
    for place, x in across.items():
        _text(svg, x - 16, HEIGHT - 14, place)
    for name, values in panel.lines.items():
        points = [(across[place], panel.height_of(value)) for place, value in values.items()]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = colours[name]
        ET.SubElement(
            svg, "polyline", {"stroke-width": "2"}, points=path, fill="none", stroke=colour
        )
        for x, y in points:
            ET.SubElement(svg, "circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r="3", fill=colour)


def _text(svg: ET.Element, x: float, y: float, text: str) -> None:
    ET.SubElement(svg, "text", x=f"{x:.1f}", y=f"{y:.1f}", fill="#333").text = text
