"""The suite against SGLang's own storage drivers: what is known to be wrong with them is found, by
the rule that is about it."""

from __future__ import annotations

import pytest

from tests.support.foreign import SuiteRun, of_cases

# A run of a foreign driver takes minutes where the processors are busy.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

KNOWN = {
    "sglang-file": {
        # A page that was cut short can never be stored again, and goes on existing.
        "test_a_set_repairs_what_a_read_found[short]": "SET-3",
        "test_a_page_found_damaged_stops_existing[short]": "EX-9",
        # A file that is too long is delivered.
        "test_damaged_pages_are_not_delivered[long]": "GET-5",
        "test_one_geometry_differs[dtype]": "ID-1",
        "test_one_field_differs[layout]": "ID-1",
        # Keys climb out of the directory, and clear takes whatever is there.
        "test_keys_stay_inside": "ID-5",
        "test_clear_leaves_others_alone": "LC-4",
        "test_clear_leaves_strangers_files_alone": "LC-4",
    },
    "sglang-hf3fs": {
        # Pages behind a hole go to the wrong places.
        "test_holes": "GET-1",
        "test_pages_pushed_out_between_lookup_and_read": "EV-2",
        # The common endpoint is the minimum.
        "test_the_greatest_common_endpoint": "EX-1",
        # Signal handlers are replaced.
        "test_the_process_is_left_alone": "LC-3",
        "test_a_hung_store[network]": "FT-3",
        "test_ranks_of_one_group[pp]": "ID-4",
        # With states of different lengths. SGLang's metadata server counts the slots of a rank by the
        # first length that it is told, so that the second failed while both had one rank.
        "test_one_side_pool": None,
        "test_pages_survive_reopening": "",
    },
    "sglang-mooncake": {
        "test_damaged_pages_are_not_delivered[short]": "GET-5",
        "test_one_field_differs[tp_size]": "ID-1",
        "test_clear_leaves_others_alone": "LC-4",
    },
    "sglang-sim": {"test_the_greatest_common_endpoint": "EX-1"},
}
"""By driver: cases, and the rule that each finds broken; empty where it holds, None where either may be."""
LONG = ("sglang-file", "sglang-hf3fs")
"""Drivers with most of the cases."""


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Runs of the drivers that are asked for, all at once, because they spend most of it waiting."""
    home = tmp_path_factory.mktemp("runs")
    known = [
        name for name in KNOWN if any(f"[{name}]" in each.name for each in request.session.items)
    ]
    begun = {name: SuiteRun(home / name, "sglang", name, *of_cases(*KNOWN[name])) for name in known}
    begun["copies"] = SuiteRun(
        home / "copies", "sglang", "sample_storage:Copies", "--level", "core,pools,identity"
    )
    yield begun
    for run in begun.values():
        run.end()


@pytest.mark.parametrize(
    "driver",
    [pytest.param(each, marks=[pytest.mark.long] if each in LONG else []) for each in KNOWN],
)
def test_known_faults_are_found_by_their_rules(runs, driver):
    wanted = {case: rule for case, rule in KNOWN[driver].items() if rule is not None}
    ran = runs[driver].ran
    assert runs[driver].broken_rules(*wanted) == wanted, ran.output
    assert ran.status == 1, ran.output
    assert ran.report["interface"] == "SGLang 0.5.23"


def test_a_right_driver_is_not_blamed(runs):
    # That the bridge is not blamed either is for `make judged` to find.
    ran = runs["copies"].ran
    assert ran.status == 0, ran.output
    assert ran.report["totals"]["untested"] == 0
    assert ran.report["totals"]["pass"] >= 15
