"""Plot of results: a self-contained SVG, readable on light and dark backgrounds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as ET

from hicache_storage.tools.bench.settings import Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.tools.bench.results import Measurement, Report

WIDTH, HEIGHT = 340, 260
LEFT, TOP, RIGHT, BOTTOM = 56, 36, 12, 40
LEGEND_LINE: Final = 18
COLOURS: Final = ("#3b7dd8", "#d9822b", "#2e9e6b", "#b354c4", "#c8453c", "#7f8a1e")
STYLE: Final = """
text { font: 12px system-ui, sans-serif; fill: #444 }
.title { font-weight: 600; font-size: 13px }
.axis { stroke: #888; fill: none }
.grid { stroke: #8884 }
@media (prefers-color-scheme: dark) { text { fill: #ccc } }
"""
UNITS: Final = {Operation.WRITE: "GB/s", Operation.EXISTS: "million keys/s", Operation.READ: "GB/s"}


def plot(report: Report) -> str:
    """Draw one panel for each operation: rate by page size.

    There is a line for each candidate and number of clients, with bars from the minimum to the
    maximum of the rounds.
    """
    series = sorted({(measure.label, measure.clients) for measure in report.measurements})
    width, height = WIDTH * len(Operation), HEIGHT + LEGEND_LINE * (len(series) + 1)
    svg = ET.Element(
        "svg",
        {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width} {height}", "role": "img"},
    )
    _draw(svg, "title").text = "hicache bench: " + ", ".join(
        candidate.label for candidate in report.candidates
    )
    _draw(svg, "style").text = STYLE
    for index, operation in enumerate(Operation):
        panel = _draw(svg, "g", transform=f"translate({index * WIDTH},0)")
        _panel(
            panel, operation, [m for m in report.measurements if m.operation is operation], series
        )
    for index, (label, clients) in enumerate(series):
        y = HEIGHT + LEGEND_LINE * (index + 1)
        _stroke(_draw(svg, "line", x1=LEFT, x2=LEFT + 24, y1=y - 4, y2=y - 4), index)
        kind = (
            str(report.client_kind)
            if clients > 1
            else str(report.client_kind).removesuffix("es").removesuffix("s")
        )
        _text(svg, LEFT + 32, y, f"{label}, {clients} {kind}")
    return ET.tostring(svg, encoding="unicode") + "\n"


def _panel(
    panel: ET.Element,
    operation: Operation,
    measurements: Sequence[Measurement],
    series: list[tuple[str, int]],
) -> None:
    sizes = sorted({measure.page_bytes for measure in measurements})
    top = _round_up(max((measure.rates()[2] for measure in measurements), default=1.0))
    _text(panel, LEFT, 20, f"{operation}, {UNITS[operation]}", kind="title")
    for step in range(5):
        y = _y(top * step / 4, top)
        _draw(panel, "line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, kind="grid")
        _text(panel, LEFT - 6, y + 4, f"{top * step / 4:g}", anchor="end")
    for size in sizes:
        name = f"{size >> 20} MiB" if not size % (1 << 20) else f"{size >> 10} KiB"
        _text(panel, _x(size, sizes), HEIGHT - BOTTOM + 18, name, anchor="middle")
    for index, (label, clients) in enumerate(series):
        mine = [
            measure
            for measure in measurements
            if (measure.label, measure.clients) == (label, clients)
        ]
        # Side by side, so that bars of several lines do not cover each other.
        shift = 4 * (index - (len(series) - 1) / 2)
        _line(
            panel,
            index,
            [
                (_x(m.page_bytes, sizes) + shift, [_y(rate, top) for rate in m.rates()])
                for m in mine
            ],
        )
    _draw(panel, "path", d=f"M{LEFT},{TOP} V{HEIGHT - BOTTOM} H{WIDTH - RIGHT}", kind="axis")


def _line(panel: ET.Element, index: int, points: list[tuple[float, list[float]]]) -> None:
    """Draw points, each of x and the heights of median, minimum and maximum."""
    points = sorted(points)
    for x, (median, minimum, maximum) in points:
        _stroke(_draw(panel, "line", x1=x, x2=x, y1=minimum, y2=maximum, opacity=0.5), index)
        _draw(panel, "circle", cx=x, cy=median, r=3, fill=COLOURS[index % len(COLOURS)])
    corners = " ".join(f"{x:.1f},{heights[0]:.1f}" for x, heights in points)
    _stroke(_draw(panel, "polyline", points=corners, fill="none"), index)


def _x(size: int, sizes: list[int]) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (sizes.index(size) + 0.5) / len(sizes)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top


def _round_up(value: float) -> float:
    """Round up to 1, 2, 4 or 8 times a power of ten.

    Quarters of an axis are short numbers then.
    """
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in (1, 2, 4, 8) if value <= step * power), 10 * power)


def _stroke(line: ET.Element, index: int) -> None:
    line.set("stroke", COLOURS[index % len(COLOURS)])
    line.set("stroke-width", "2")
    # Colours begin again, so that lines have to differ otherwise.
    if index >= len(COLOURS):
        line.set("stroke-dasharray", "5 3")


def _text(
    parent: ET.Element, x: float, y: float, text: str, *, kind: str = "", anchor: str = "start"
) -> None:
    _draw(parent, "text", x=x, y=y, text_anchor=anchor, kind=kind).text = text


def _draw(parent: ET.Element, tag: str, *, kind: str = "", **attributes: str | float) -> ET.Element:
    """Add an element; `kind` is its CSS class, and underscores stand for hyphens."""
    written = {
        name.replace("_", "-"): f"{value:.1f}".removesuffix(".0")
        if isinstance(value, float)
        else str(value)
        for name, value in attributes.items()
    }
    # `class` is a keyword of Python, so that it cannot be an argument.
    return ET.SubElement(parent, tag, written | ({"class": kind} if kind else {}))
