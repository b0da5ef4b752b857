"""What `benchmarks/field.py` computes from what it has measured."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def field(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    import field

    yield field
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def results(field):
    """`file` at half of the limit and twice as fast as the peer; the limit is that of two threads."""
    found = field.Results()
    for workload in (("1 MiB", 1, 32), ("64 KiB", 1, 32)):
        for side, seconds in (
            ("limit, 1 thread", 0.4),
            ("limit, 2 threads", 0.1),
            ("file", 0.2),
            ("vLLM `fs`", 0.4),
        ):
            for noise in (1.0, 0.5, 2.0):
                timed = field.Timed(True, noise * seconds, noise * seconds / 2)
                found.of(workload, "read, cached", side).add(timed, True)
        for _ in range(3):
            found.of(workload, "exists", "file").add(field.Timed(32, 5e-5, 5e-5), 32)
    return found


def test_the_table_has_the_part_of_the_limit_and_the_ratio_to_the_fastest_peer(field, results):
    text = field.report(results, {"SGLang NIXL POSIX": "no wheel"}, list(field.SIDES))
    [row] = [line for line in text.splitlines() if line.startswith("| read, cached | 1 MiB")][:1]
    # 32 MiB in 0.1 s; the file driver takes 0.2, and the peer 0.4.
    assert row.startswith("| read, cached | 1 MiB | 1 x 32 | 0.34 | 0.50, 2.00x |")
    assert "| 0.25 |" in row
    assert "| SGLang NIXL POSIX | no wheel |" in text
    assert "| 64 KiB | 32 | 50 |" in text
    # 0.1 s of CPU time for 32 pages.
    assert "| read, cached | 1 MiB | 1 x 32 | 1562 | 3125 |" in text


def test_a_wrong_answer_is_no_result(field, results):
    with pytest.raises(AssertionError, match="file: exists answered 31"):
        results.of(("1 MiB", 1, 32), "exists", "file").add(field.Timed(31, 1.0, 1.0), 32)


def test_the_plot_has_a_point_for_each_size_and_side(field, results):
    svg = ET.fromstring(field.plot(results, ["limit", "file", "vLLM `fs`"]))
    circles = [one for one in svg.iter() if one.tag.endswith("circle")]
    heights = [float(one.get("cy")) for one in circles]
    assert len(circles) == 4
    # A log scale: a half and a quarter are as far apart as one and a half.
    panel = field.Panel("", [], {}, [], 0.03, 2.0)
    expected = panel.height_of(0.5) - panel.height_of(1.0)
    assert heights[2] - heights[0] == pytest.approx(expected, abs=0.2)


def test_two_machines_are_compared_by_the_workloads_of_both(field, results):
    kept = {
        "machine": {"cpu": "one, 2 cores", "kernel": "6"},
        "series": [series.kept() for series in results],
    }
    halved = [one | {"median": one["median"] / 2, "side": one["side"]} for one in kept["series"]]
    text = field.compare(kept, {"machine": {"cpu": "two", "kernel": "6"}, "series": halved[:1]})
    assert (
        text.splitlines()[-1]
        == "| read, cached | 1 MiB | 1 x 32 | limit, 1 thread | 2.00x | 1.00x |"
    )


def test_calls_that_move_too_much_at_once_are_left_out(field):
    found = list(field.workloads(["64 KiB", "4 MiB"], list(field.CALLS)))
    assert found == [("64 KiB", 1, 32), ("64 KiB", 1, 128), ("64 KiB", 4, 32), ("4 MiB", 1, 32)]


def test_sides_share_the_calls_that_are_chosen(field):
    assert list(field.workloads(["64 KiB"], ["1 x 128"])) == [("64 KiB", 1, 128)]


def test_an_environment_that_is_not_there_has_no_versions(field, tmp_path):
    assert field.versions(tmp_path / "python") == {}
