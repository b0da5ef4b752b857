"""The suite against secondary tiers of vLLM and L2 adapters of LMCache: theirs, ours, and ours with
one planted fault."""

from __future__ import annotations

import pytest

from tests.support.foreign import SuiteRun, of_cases

# Each run imports its engine, which takes a minute where the processors are busy.
pytestmark = pytest.mark.vllm

DAMAGE = "test_damaged_pages_are_not_delivered[flipped-bit]"
SHORT = "test_a_page_found_damaged_stops_existing[short]"
TP = "test_another_tp_size"
DTYPE = "test_one_field_differs[kv_dtype]"
READ = "test_pages_read_back"

KNOWN = {
    ("vllm-tier", "vllm-fs"): {
        DAMAGE: "GET-5",
        TP: "ID-1",
        "test_one_field_differs[layout]": "ID-1",
        READ: "",
    },
    ("lmcache-l2", "lmcache-fs"): {DAMAGE: "GET-5", DTYPE: "ID-1", SHORT: "EX-9", TP: ""},
    ("lmcache-l2", "lmcache-fs-native"): {DAMAGE: "GET-5", DTYPE: "ID-1", SHORT: "EX-9", TP: ""},
    ("vllm-tier", "sample_tier:NeverReports"): {DAMAGE: "FT-3", READ: ""},
    ("vllm-tier", "sample_tier:KeepsTheUnreadable"): {DAMAGE: "FT-3", READ: ""},
    ("vllm-tier", "sample_tier:ReportsTwice"): {READ: "fail"},
    ("lmcache-l2", "sample_adapter:ForgetsTheEvent"): {READ: "FT-3"},
}
"""By interface and driver: cases, and the rule that each finds broken; empty where it holds, `fail` where
the engine ends and no rule is named."""

IN_CI = ("vllm-fs", "lmcache-fs")
"""One driver of each interface."""


def judge(place, interface, driver, *arguments):
    """Run the suite; samples have their store below a directory of the case."""
    store = ("-c", "driver=file", "-c", 'driver_config={"path": "{tmp}/store"}')
    options = store if ":" in driver else ()
    return SuiteRun(place, interface, driver, *options, *arguments)


@pytest.mark.parametrize(
    ("interface", "driver"),
    [pytest.param(*of, marks=[] if of[1] in IN_CI else pytest.mark.long) for of in KNOWN],
    ids=lambda text: text.replace(":", "-"),
)
def test_a_known_fault_is_found_by_its_rule(tmp_path, interface, driver):
    wanted = KNOWN[interface, driver]
    run = judge(tmp_path, interface, driver, *of_cases(*wanted))
    assert run.broken_rules(*wanted) == wanted, run.ran.output
    assert run.ran.status == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("interface", "driver"),
    [("vllm-tier", "vllm-bridge"), ("lmcache-l2", "lmcache-bridge")],
)
def test_a_right_driver_is_not_blamed(tmp_path, interface, driver):
    ran = judge(tmp_path, interface, driver, "--level", "core,identity").ran
    assert ran.status == 0, ran.output
    assert ran.report["totals"]["untested"] == 0
    assert "ID-1" in ran.rules("pass")


@pytest.mark.long
def test_a_tier_that_blocks_the_scheduler_is_told_apart(tmp_path):
    driver = "sample_tier:BlocksTheScheduler"
    ran = judge(tmp_path, "vllm-tier", driver, *of_cases(READ), "--case-seconds", "30").ran
    assert ran.status == 1, ran.output
    assert "FT-3" in ran.rules("fail")
