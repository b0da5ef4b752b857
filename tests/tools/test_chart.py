"""Line charts: every value has its point, inside of the drawing, at the height of its scale."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from hicache_storage.tools.chart import HEIGHT, WIDTH, Panel, draw, quarters

SVG = "{http://www.w3.org/2000/svg}"
PLACES = ["64 KiB", "1 MiB"]


def test_a_point_for_each_value_within_the_drawing():
    lines = {
        name: {
            place: (value, value / 2, 2 * value)
            for place, value in zip(PLACES, (1.0, 3.0), strict=True)
        }
        for name in ("a", "b <&>")
    }
    svg = ET.fromstring(draw("t", [Panel("read, GB/s", PLACES, lines, quarters(6.0))] * 2))
    circles = list(svg.iter(f"{SVG}circle"))
    assert len(circles) == 8
    assert all(0 < float(circle.attrib["cx"]) < WIDTH for circle in circles)
    assert all(0 < float(circle.attrib["cy"]) < HEIGHT for circle in circles)
    texts = {element.text for element in svg.iter(f"{SVG}text")}
    assert {*PLACES, "read, GB/s", "a", "b <&>"} <= texts


def test_a_line_may_lack_places():
    svg = ET.fromstring(draw("t", [Panel("p", PLACES, {"a": {"1 MiB": (1.0,)}}, quarters(1.0))]))
    assert len(list(svg.iter(f"{SVG}circle"))) == 1


def test_on_a_logarithmic_scale_equal_factors_are_equally_high():
    panel = Panel("p", PLACES, {}, (0.1, 1.0, 10.0), logarithmic=True)
    assert panel.height_of(0.5) - panel.height_of(1.0) == pytest.approx(
        panel.height_of(0.25) - panel.height_of(0.5)
    )
    assert panel.height_of(0.01) == panel.height_of(0.1)
    assert panel.height_of(20.0) == panel.height_of(10.0)


@pytest.mark.parametrize(
    ("largest", "top"), [(0.0, 1.0), (1.0, 1.0), (1.1, 2.0), (7.0, 8.0), (9.0, 10.0), (0.3, 0.4)]
)
def test_quarters_end_at_a_short_number_above(largest, top):
    assert quarters(largest)[0] == 0.0
    assert quarters(largest)[-1] == pytest.approx(top)
