"""The suite against SGLang's own storage drivers: what is known to be wrong with them is found, by
the rule that is about it."""

from __future__ import annotations

import shlex

import pytest

from tests.support.commands import run_hicache
from tests.support.foreign import SuiteRun, of_cases

# A run of a foreign driver takes minutes where the processors are busy.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

KNOWN = {
    "sglang-file": {
        "a page that was cut short can never be stored again": (
            "SET-3",
            "test_a_set_repairs_what_a_read_found[short]",
        ),
        "a page that was cut short goes on existing": (
            "EX-9",
            "test_a_page_found_damaged_stops_existing[short]",
        ),
        "a file that is too long is delivered": (
            "GET-5",
            "test_damaged_pages_are_not_delivered[long]",
        ),
        "a page of another element type is delivered": ("ID-1", "test_one_geometry_differs[dtype]"),
        "a page of another layout is delivered": ("ID-1", "test_one_field_differs[layout]"),
        "keys climb out of the directory": ("ID-5", "test_keys_stay_inside"),
        "clear takes other models' pages": ("LC-4", "test_clear_leaves_others_alone"),
        "clear takes files that it has not written": (
            "LC-4",
            "test_clear_leaves_strangers_files_alone",
        ),
    },
    "sglang-hf3fs": {
        "pages behind a hole go to the wrong places": ("GET-1", "test_holes"),
        "a page that is evicted during a read is delivered as another": (
            "EV-2",
            "test_pages_pushed_out_between_lookup_and_read",
        ),
        "the common endpoint is the minimum": ("EX-1", "test_the_greatest_common_endpoint"),
        "signal handlers are replaced": ("LC-3", "test_the_process_is_left_alone"),
        "a server that hangs is waited for": ("FT-3", "test_a_hung_store[network]"),
        "stages of a pipeline read each other's pages": ("ID-4", "test_ranks_of_one_group[pp]"),
    },
    "sglang-mooncake": {
        "a short object is delivered": ("GET-5", "test_damaged_pages_are_not_delivered[short]"),
        "a page of another TP size is delivered": ("ID-1", "test_one_field_differs[tp_size]"),
        "clear takes other models' pages": ("LC-4", "test_clear_leaves_others_alone"),
    },
    "sglang-sim": {
        "the common endpoint is the minimum": ("EX-1", "test_the_greatest_common_endpoint")
    },
}

APART = ("test_one_side_pool", "test_pages_survive_reopening")
"""Cases with states of different lengths. SGLang's metadata server counts the slots of a rank by
the first length that it is told, so that the second case failed while both had one rank."""

LONG = ("sglang-file", "sglang-hf3fs")
"""Drivers with most of the cases."""


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Runs of the drivers that are asked for, all at once, because they spend most of it waiting."""
    home = tmp_path_factory.mktemp("runs")
    known = {
        driver: cases
        for driver, cases in KNOWN.items()
        if driver not in LONG or any(f"[{driver}" in item.name for item in request.session.items)
    }
    begun = {
        driver: SuiteRun(
            home / driver,
            "sglang",
            driver,
            *of_cases(*(case for _, case in cases.values()), *APART),
        )
        for driver, cases in known.items()
    }
    begun["copies"] = SuiteRun(
        home / "copies", "sglang", "sample_storage:Copies", "--level", "core,pools,identity"
    )
    yield begun
    for run in begun.values():
        run.end()


def _params(*values):
    """A parameter set; `long` for a driver with many cases."""
    return pytest.param(*values, marks=[pytest.mark.long] if values[0] in LONG else [])


@pytest.mark.parametrize(
    ("driver", "fault"),
    [_params(driver, fault) for driver, known in KNOWN.items() for fault in known],
    ids=lambda text: text.replace(" ", "-"),
)
def test_a_known_fault_is_found_by_its_rule(runs, driver, fault):
    rule, case = KNOWN[driver][fault]
    found = runs[driver].ran.cases[case]
    assert (found["outcome"], found["broken_rule"]) == ("fail", rule), found["reason"]


@pytest.mark.long
def test_cases_do_not_meet_on_a_server_that_keeps_one_length_for_each_rank(runs):
    found = runs["sglang-hf3fs"].ran.cases[APART[1]]
    assert found["outcome"] == "pass", found["reason"]


@pytest.mark.parametrize("driver", [_params(driver) for driver in KNOWN])
def test_a_driver_with_faults_exits_1(runs, driver):
    ran = runs[driver].ran
    assert ran.status == 1, ran.output
    assert ran.report["interface"] == "SGLang 0.5.23"


def test_a_right_driver_is_not_blamed(runs):
    # That the bridge is not blamed either is for `make judged` to find.
    ran = runs["copies"].ran
    assert ran.status == 0, ran.output
    assert ran.report["totals"]["untested"] == 0
    assert ran.report["totals"]["pass"] >= 15


@pytest.mark.long
def test_the_command_in_a_report_shows_a_fault_again(runs):
    case = runs["sglang-sim"].ran.cases["test_the_greatest_common_endpoint"]
    program, *arguments = shlex.split(case["reproduce"])
    assert program == "hicache"
    again = run_hicache(*arguments)
    assert again.returncode == 1
    assert case["reason"] in " ".join((again.stdout + again.stderr).split())


def test_a_driver_that_is_not_there_exits_2(tmp_path):
    ran = SuiteRun(tmp_path, "sglang", "no_such_module:Storage").ran
    assert ran.status == 2
    assert "cannot import no_such_module:Storage" in ran.words
