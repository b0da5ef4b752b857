"""`hicache conformance run ... --interface sglang`, on a machine without SGLang.

The drivers lie in the current directory.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow(seconds=75)

DRIVERS = Path(__file__).with_name("interfaces")


@pytest.fixture
def judge(site):
    """Run the suite on one of the sample drivers."""

    def run(driver, line, interface="--interface sglang -c interface_v1=1"):
        return site.judge(f"{driver} {interface} --profile smoke --seed 3 {line}", cwd=DRIVERS)

    return lambda driver, *arguments: run(f"sample_storage:{driver}", *arguments)


def test_a_right_driver_in_the_current_directory_exits_0(judge):
    ran = judge("SampleStorage", "--level core,identity")
    assert ran.status == 0, ran.output
    assert [ran.report["totals"][name] for name in ("fail", "untested", "error")] == [0, 0, 0]
    assert ran.rules("pass") >= {"ID-1", "ID-5", "EX-1", "GET-1", "SET-1", "LC-4"}


@pytest.mark.long
def test_a_method_that_is_not_implemented_is_not_declared_and_its_text_quoted(judge):
    ran = judge("KvAlone", "--level core,pools,identity")
    assert (ran.report["totals"]["fail"], ran.report["totals"]["error"]) == (0, 0), ran.output
    reasons = {rule["id"]: rule["reason"] for rule in ran.report["rules"]}
    side = "batch_set_v2 of the driver raises NotImplementedError: side pools come in version 2"
    assert side in reasons["EX-3"]
    said = {case["reason"] for case in ran.cases.values()}
    assert {side, "clear of the driver raises NotImplementedError"} <= said
    assert ran.rules("pass") >= {"GET-1", "SET-1", "ID-1", "EX-1"}


def test_a_wrong_driver_exits_1(judge):
    ran = judge("Compacts", "--case test_holes --case test_pages_read_back")
    assert ran.status == 1, ran.output
    assert ran.outcomes["test_holes"] == ("fail", "GET-1")
    assert ran.outcomes["test_pages_read_back"] == ("pass", "")


@pytest.mark.parametrize(
    ("driver", "case", "rule", "words"),
    [
        ("Rewrites", "test_existing_pages_are_not_rewritten", "SET-3", "a set wrote it anew"),
        ("GetsOneValue", "test_pages_read_back", "GET-3", "must be a list with one truth value"),
        ("SetsShorter", "test_pages_read_back", "GET-3", "must be a list with one truth value"),
        ("BlankFirst", "test_pages_are_read_while_they_are_set", "GET-1", "read while it was set"),
        ("ClearsHalf", "test_clear_removes_its_own", "LC-4", "was cleared by clear"),
    ],
)
def test_a_mutant_of_this_interface_is_found(judge, driver, case, rule, words):
    ran = judge(driver, f"--case {case}")
    assert ran.status == 1, ran.output
    assert ran.outcomes[case] == ("fail", rule)
    assert words in ran.cases[case]["detail"]


@pytest.mark.parametrize(
    ("driver", "case", "outcome"),
    [
        # A set may be answered for the halves of pages.
        ("AnswersForHalves", "test_pages_read_back", "pass"),
        # A window has a page at least, as the engine's have.
        pytest.param("NeedsWindows", "test_one_side_pool", "pass", marks=pytest.mark.long),
        # A clear that promises no more than the base class's.
        *(
            pytest.param(name, "test_clear_removes_its_own", "not declared", marks=pytest.mark.long)
            for name in ("ClearsNothing", "HasAnEmptyClear")
        ),
    ],
)
def test_what_the_interface_allows_is_no_fault(judge, driver, case, outcome):
    ran = judge(driver, f"--case {case}")
    assert ran.outcomes[case] == (outcome, ""), ran.output


@pytest.mark.long
@pytest.mark.parametrize(
    ("driver", "arguments", "words"),
    [
        ("Ends", (), "driver 'sample_storage:Ends' cannot be opened: SystemExit: no server"),
        ("Nothing", (), "cannot import sample_storage:Nothing"),
        (
            ":Nothing",
            (),
            "'sample_storage::Nothing' is neither MODULE:CLASS nor one of sglang-file",
        ),
        (
            "SampleStorage",
            ("--interface gelato",),
            "unknown interface 'gelato'; interfaces are sglang, vllm-tier, lmcache-l2",
        ),
        *(
            ("SampleStorage", ("--interface sglang", f"--page-bytes {length}"), repr(length))
            for length in ("100", "8192000001", "some")
        ),
    ],
)
def test_what_cannot_be_run_exits_2_and_says_why(judge, driver, arguments, words):
    interface, more = (*arguments, *("--interface sglang", "")[len(arguments) :])
    ran = judge(driver, f"{more} --case test_holes", interface)
    assert ran.status == 2, ran.output
    assert words in ran.words


def test_a_driver_that_is_not_judged_is_refused_with_the_reason(site):
    ran = site.judge("sglang-shm --interface sglang")
    assert ran.status == 2, ran.output
    assert "there is nothing to judge" in ran.words


@pytest.mark.long
def test_pages_are_as_long_as_the_driver_needs_them(judge):
    ran = judge("Blocks", "--case test_pages_read_back")
    assert ran.status == 1, ran.output
    assert "it has 256 bytes, and --page-bytes gives pages another length" in ran.words
    ran = judge("Blocks", "--page-bytes 8KiB --level core,identity")
    assert ran.status == 0, ran.output
    assert ran.report["page_bytes"] == 8192
    assert ran.report["totals"]["fail"] == ran.report["totals"]["untested"] == 0


@pytest.mark.long
def test_the_length_of_pages_goes_into_what_repeats_a_failure(judge):
    ran = judge("Compacts", "--page-bytes 8KiB --case test_holes")
    assert "of 16384 bytes differ" in ran.output
    assert "--page-bytes 8192" in ran.cases["test_holes"]["reproduce"]
