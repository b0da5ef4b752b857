"""The suite against SGLang's own storage drivers: what is known to be wrong with them is found, by
the rule that is about it."""

from __future__ import annotations

import sys

import pytest

from hicache_conformance.report.files import TEST
from tests.support.commands import run_hicache, run_program
from tests.support.foreign import SAMPLES, SuiteRun, of_cases

# A run of a foreign driver takes minutes where the processors are busy.
pytestmark = pytest.mark.interop

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
SAMPLES_KNOWN = {
    "Wrong": {
        "test_holes": "GET-1",
        "test_existing_pages_are_not_rewritten": "SET-3",
        "test_pages_are_read_while_they_are_set": "GET-1",
        "test_clear_removes_its_own": "LC-4",
        "test_pages_read_back": "",
    },
    # The first one begins with a set, the other one with a get.
    "OtherForms": {"test_holes": "GET-3", "test_pages_read_back": "GET-3"},
    # A window has a page at least, as the engine's have.
    "NeedsWindows": {"test_one_side_pool": ""},
}
"""The same of the samples."""
LONG = ("sglang-file", "sglang-hf3fs")
"""Drivers with most of the cases."""
ZERO_COPY = ("-c", "interface_v1=1")


def judge(place, driver, *arguments):
    """Run the suite on a sample."""
    return SuiteRun(place, "sglang", f"sample_storage:{driver}", *ZERO_COPY, *arguments)


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


@pytest.mark.parametrize(
    "driver", ["Wrong", "OtherForms", pytest.param("NeedsWindows", marks=pytest.mark.long)]
)
def test_planted_faults_are_found_by_their_rules(tmp_path, driver):
    wanted = SAMPLES_KNOWN[driver]
    run = judge(tmp_path, driver, *of_cases(*wanted))
    assert run.broken_rules(*wanted) == wanted, run.ran.output
    # Not all rules are tested.
    assert run.ran.status == 1


def test_a_right_driver_is_not_blamed(runs):
    # That the bridge is not blamed either is for `make judged` to find.
    ran = runs["copies"].ran
    assert ran.status == 0, ran.output
    assert ran.report["totals"]["untested"] == 0
    assert ran.report["totals"]["pass"] >= 15


@pytest.mark.long
def test_a_method_that_is_not_implemented_is_not_declared_and_its_text_quoted(tmp_path):
    ran = judge(tmp_path, "KvAlone", "--level", "core,pools,identity").ran
    assert (ran.report["totals"]["fail"], ran.report["totals"]["error"]) == (0, 0), ran.output
    reasons = {rule["id"]: rule["reason"] for rule in ran.report["rules"]}
    side = "batch_set_v2 of the driver raises NotImplementedError: side pools come in version 2"
    assert side in reasons["EX-3"]
    said = {case["reason"] for case in ran.cases.values()}
    assert {side, "clear of the driver raises NotImplementedError"} <= said
    assert ran.rules("pass") >= {"GET-1", "SET-1", "ID-1", "EX-1"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("driver", "words"),
    [
        ("Ends", "driver 'sample_storage:Ends' cannot be opened: SystemExit: no server"),
        ("Nothing", "cannot import sample_storage:Nothing"),
    ],
)
def test_what_cannot_be_run_exits_2_and_says_why(tmp_path, driver, words):
    ran = judge(tmp_path, driver, "--case", "test_holes").ran
    assert ran.status == 2, ran.output
    assert words in ran.words


@pytest.mark.long
def test_pages_are_as_long_as_the_driver_needs_them(tmp_path):
    ran = judge(tmp_path, "Blocks", "--case", "test_pages_read_back").ran
    assert ran.status == 1, ran.output
    assert "it has 256 bytes, and --page-bytes gives pages another length" in ran.words
    ran = judge(tmp_path, "Blocks", "--page-bytes", "8KiB", "--level", "core,identity").ran
    assert ran.status == 0, ran.output
    assert ran.report["page_bytes"] == 8192
    assert ran.report["totals"]["fail"] == ran.report["totals"]["untested"] == 0


@pytest.mark.long
def test_a_driver_of_mine_is_adopted(tmp_path):
    adopt = ("conformance", "adopt", "sglang", "--driver", "sample_storage:Wrong")
    home = SAMPLES["sglang"]
    ran = run_hicache(*adopt, *ZERO_COPY, "-o", tmp_path, cwd=home)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "expected to fail: GET-1" in " ".join(ran.stderr.split())
    assert "--config=interface_v1=1" in (tmp_path / TEST).read_text()
    again = run_program(sys.executable, "-m", "pytest", "-q", tmp_path / TEST, cwd=home)
    assert again.returncode == 0, again.stdout + again.stderr
