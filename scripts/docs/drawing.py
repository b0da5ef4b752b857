"""Line drawings as SVG: boxes, cells, arrows and text, in colours that the page around them may
set."""

from __future__ import annotations

from html import escape
from typing import Final

STYLE: Final = (
    ".d{--ink:#1b1f24;--soft:#5b6570;--paper:#fff;--fill:#eef6f5;--accent:#0f766e;"
    "font:13px ui-sans-serif,system-ui,'Segoe UI','DejaVu Sans',sans-serif}"
    "@media(prefers-color-scheme:dark){.d{--ink:#e7eaed;--soft:#a3adb8;--paper:#15191d;--fill:#1a2a2c;--accent:#5eead4}}"
    ".d text{fill:var(--ink)}.d .s{fill:var(--soft);font-size:11.5px}.d .h{font-weight:600}.d "
    ".m{font-family:ui-monospace,"
    "Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:12px}.d "
    ".b{fill:var(--paper);stroke:var(--soft)}"
    ".d .k{fill:var(--fill);stroke:var(--accent)}.d "
    ".o{fill:none;stroke:var(--soft);stroke-dasharray:4 3}"
    ".d .a{fill:none;stroke:var(--ink);stroke-width:1.3}.d .p{fill:var(--ink)}.d "
    ".on{fill:var(--accent);stroke:var(--accent)}"
    ".d .off{fill:none;stroke:var(--soft)}.d .r{text-anchor:end}.d .c{text-anchor:middle}"
)


class Drawing:
    """A drawing of a width and height in pixels, with a title for those who cannot see it."""

    def __init__(self, width: int, height: int, title: str) -> None:
        opening = f'<svg class="d" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        self._parts = [f"{opening}<title>{escape(title)}</title><style>{STYLE}</style>"]

    def box(
        self, x: int, y: int, width: int, height: int, title: str, *lines: str, kind: str = "b"
    ) -> None:
        """A box with a heading and lines below it. Kinds: `b` plain, `k` what the drawing is about,
        `o` an outline around others."""
        self._parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>'
        )
        self.text(x + 12, y + 22, title, "h")
        for number, line in enumerate(lines):
            self.text(x + 12, y + 42 + 17 * number, line, "s")

    def cell(self, x: int, y: int, width: int, height: int, label: str, *, kind: str = "b") -> None:
        """A box with one label in its middle."""
        self._parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="3"/>'
        )
        self.text(x + width // 2, y + height // 2 + 4, label, "s c")

    def dot(self, x: int, y: int, *, on: bool) -> None:
        """A mark that is set or not."""
        self._parts.append(f'<circle class="{"on" if on else "off"}" cx="{x}" cy="{y}" r="7"/>')

    def text(self, x: int, y: int, text: str, kind: str = "") -> None:
        """One line. Kinds: `h` heading, `s` small, `m` code; `c` centred at x, `r` ending at x."""
        self._parts.append(f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>')

    def arrow(
        self,
        *points: tuple[int, int],
        label: str = "",
        at: tuple[int, int] | None = None,
        both: bool = False,
    ) -> None:
        """A line through some points with a head at its end, or at both, and a label, in the middle
        if nothing else is said."""
        path = " ".join(f"{x},{y}" for x, y in points)
        self._parts.append(f'<polyline class="a" points="{path}"/>')
        self._head(points[-2], points[-1])
        if both:
            self._head(points[1], points[0])
        if label:
            (x1, y1), (x2, y2) = points[0], points[-1]
            x, y = at or ((x1 + x2) // 2, (y1 + y2) // 2 - 7)
            self.text(x, y, label, "s c")

    def _head(self, before: tuple[int, int], tip: tuple[int, int]) -> None:
        dx, dy = tip[0] - before[0], tip[1] - before[1]
        length = (dx * dx + dy * dy) ** 0.5
        dx, dy = round(8 * dx / length), round(8 * dy / length)
        base_x, base_y = tip[0] - dx, tip[1] - dy
        side_x, side_y = -dy // 2, dx // 2
        corners = f"{tip[0]},{tip[1]} {base_x + side_x},{base_y + side_y} {base_x - side_x},{base_y - side_y}"
        self._parts.append(f'<polygon class="p" points="{corners}"/>')

    def svg(self) -> str:
        """The text of the file."""
        return "\n".join([*self._parts, "</svg>\n"])
