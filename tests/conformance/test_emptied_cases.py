"""A case that has been emptied is no pass: each one of the suite, with any driver."""

from __future__ import annotations

from hicache_conformance.suite.driver_conformance import catalogue

# Without needs, so that a driver without servers gets every case.
EMPTIED = """
import functools

import pytest

from hicache_conformance import DriverConformance
from hicache_conformance.model import CASE_MARK
from hicache_conformance.suite.driver_conformance import catalogue

class TestMemory(DriverConformance):
    driver = "memory"
    config = {"store": "emptied"}

def emptied(case):
    @functools.wraps(case)
    def empty(*_, **__):
        pass

    marks = [mark for mark in case.pytestmark if mark.name != CASE_MARK]
    [covered] = [mark.kwargs for mark in case.pytestmark if mark.name == CASE_MARK]
    empty.pytestmark = [
        *marks, getattr(pytest.mark, CASE_MARK)(**{**covered, "needs": (), "corrupts": False}).mark
    ]
    return empty

for name in catalogue():
    setattr(TestMemory, name, emptied(getattr(TestMemory, name)))
"""


def test_no_emptied_case_passes(site, tmp_path, results):
    (tmp_path / "test_emptied.py").write_text(EMPTIED)
    ran = site.pytest(
        "-q",
        "-p",
        "no:cacheprovider",
        "--hicache-profile=smoke",
        "--hicache-seed=1",
        "--hicache-report=out",
        cwd=tmp_path,
    )
    assert ran.status == 1, ran.output
    report = results(tmp_path / "out")
    assert report["verdict"] == "incomplete"
    ends = {
        case["name"].partition("[")[0]: (case["outcome"], case["reason"])
        for rule in report["rules"]
        for case in rule["cases"]
    }
    assert ends.keys() == catalogue().keys()
    assert set(ends.values()) == {
        ("untested", "the case ended and has checked none of its rules"),
    }
    assert {rule["asserting_cases"] for rule in report["rules"]} == {0}
