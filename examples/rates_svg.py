"""Line charts of rates between 0 and 1, as SVG, for the examples."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 440, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 20, 64, 48
COLOURS = ("#0b6e4f", "#c8553d", "#3d5a80", "#8d6a9f")


@dataclass(frozen=True)
class Line:
    """A series of points."""

    name: str
    xs: Sequence[float]
    rates: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """One chart; all lines have the same places on the x axis."""

    title: str
    axis: str
    lines: Sequence[Line]


def draw(title: str, panels: Sequence[Panel]) -> str:
    """Panels side by side."""
    width = WIDTH * len(panels)
    body = "".join(
        f'<g transform="translate({WIDTH * place},0)">{_panel(panel)}</g>'
        for place, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" '
        f'height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" '
        f'fill="white"/>{_text(width / 2, 20, title, size=14)}{body}</svg>\n'
    )


def _panel(panel: Panel) -> str:
    xs = panel.lines[0].xs
    parts = [
        _text((LEFT + WIDTH - RIGHT) / 2, 40, panel.title),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, panel.axis),
    ]
    for step in range(6):
        rate = step / 5
        y = _y(rate)
        parts.append(
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" '
            f'stroke="#ddd"/>{_text(LEFT - 16, y + 4, f"{rate:.1f}")}'
        )
    parts += [_text(_x(x, xs), HEIGHT - BOTTOM + 18, f"{x:g}") for x in xs]
    parts += [_line(line, xs, place) for place, line in enumerate(panel.lines)]
    return "".join(parts)


def _line(line: Line, xs: Sequence[float], place: int) -> str:
    colour = COLOURS[place % len(COLOURS)]
    points = [(_x(x, xs), _y(rate)) for x, rate in zip(line.xs, line.rates, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points
    )
    label = f'<text x="{LEFT + 8 + 110 * place}" y="{TOP - 8}" fill="{colour}">{escape(line.name)}</text>'
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}{label}'
    )


def _x(x: float, xs: Sequence[float]) -> float:
    span = max(xs) - min(xs) or 1
    return LEFT + (x - min(xs)) / span * (WIDTH - LEFT - RIGHT)


def _y(rate: float) -> float:
    return HEIGHT - BOTTOM - rate * (HEIGHT - TOP - BOTTOM)


def _text(x: float, y: float, text: str, *, size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="middle" fill="#333">{escape(text)}</text>'
