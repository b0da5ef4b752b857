"""`hicache conformance run ... --interface sglang`, on a machine without SGLang.

The drivers lie in the current directory.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow(seconds=75)

DRIVERS = Path(__file__).with_name("interfaces")
RUN = ("conformance", "run")
SGLANG = ("--interface", "sglang", "-c", "interface_v1=1", "--profile", "smoke", "--seed", "3")


def outcomes(report):
    """What became of each case, and which rule it found broken."""
    return {
        case["name"]: (case["outcome"], case["broken_rule"])
        for rule in report["rules"]
        for case in rule["cases"]
    }


def test_a_right_driver_in_the_current_directory_exits_0(site, tmp_path, results):
    ran = site.hicache(
        *RUN,
        "sample_storage:SampleStorage",
        *SGLANG,
        "--level",
        "core,identity",
        "--report",
        str(tmp_path),
        cwd=DRIVERS,
    )
    assert ran.status == 0, ran.output
    report = results(tmp_path)
    assert (
        report["totals"]["fail"] == report["totals"]["untested"] == report["totals"]["error"] == 0
    )
    assert {rule["id"] for rule in report["rules"] if rule["outcome"] == "pass"} >= {
        "ID-1",
        "ID-5",
        "EX-1",
        "GET-1",
        "SET-1",
        "LC-4",
    }


@pytest.mark.long
def test_a_method_that_is_not_implemented_is_not_declared_and_its_text_quoted(
    site, tmp_path, results
):
    ran = site.hicache(
        *RUN,
        "sample_storage:KvAlone",
        *SGLANG,
        "--level",
        "core,pools,identity",
        "--report",
        str(tmp_path),
        cwd=DRIVERS,
    )
    report = results(tmp_path)
    assert (report["totals"]["fail"], report["totals"]["error"]) == (0, 0), ran.output
    reasons = {rule["id"]: rule["reason"] for rule in report["rules"]}
    side = "batch_set_v2 of the driver raises NotImplementedError: side pools come in version 2"
    assert side in reasons["EX-3"]
    said = {case["reason"] for rule in report["rules"] for case in rule["cases"]}
    assert side in said
    assert "clear of the driver raises NotImplementedError" in said
    passed = {rule["id"] for rule in report["rules"] if rule["outcome"] == "pass"}
    assert passed >= {"GET-1", "SET-1", "ID-1", "EX-1"}


def test_a_wrong_driver_exits_1(site, tmp_path, results):
    cases = ("--case", "test_holes", "--case", "test_pages_read_back")
    ran = site.hicache(
        *RUN, "sample_storage:Compacts", *SGLANG, *cases, "--report", str(tmp_path), cwd=DRIVERS
    )
    assert ran.status == 1, ran.output
    found = outcomes(results(tmp_path))
    assert found["test_holes"] == ("fail", "GET-1")
    assert found["test_pages_read_back"] == ("pass", "")


@pytest.mark.parametrize(
    ("driver", "case", "rule", "words"),
    [
        ("Rewrites", "test_single_pages_are_not_rewritten", "SET-3", "a set wrote it anew"),
        *(
            pytest.param(
                f"{call}{shape}",
                "test_pages_read_back",
                "GET-3",
                "must be a list with one truth value for each of",
                marks=[pytest.mark.long] if call == "Sets" or shape == "OneValue" else [],
            )
            for call in ("Gets", "Sets")
            for shape in ("OneValue", "Shorter", "Numbers", "Generators")
        ),
        ("TwoHalves", "test_pages_are_read_while_they_are_set", "GET-1", "read while it was set"),
        (
            "ClearKeepsTheReadCache",
            "test_clear_removes_what_was_read",
            "LC-4",
            "was cleared by clear 0 of 2, and a get delivers it: holds its own bytes",
        ),
    ],
)
def test_a_mutant_of_this_interface_is_found(site, tmp_path, results, driver, case, rule, words):
    arguments = (*SGLANG, "--case", case, "--report", str(tmp_path))
    ran = site.hicache(*RUN, f"sample_storage:{driver}", *arguments, cwd=DRIVERS)
    assert ran.status == 1, ran.output
    report = results(tmp_path)
    assert outcomes(report)[case] == ("fail", rule)
    assert any(words in found["detail"] for one in report["rules"] for found in one["cases"])


def test_a_set_may_be_answered_for_the_halves_of_pages(site, tmp_path, results):
    arguments = (*SGLANG, "--case", "test_pages_read_back", "--report", str(tmp_path))
    ran = site.hicache(*RUN, "sample_storage:AnswersForHalves", *arguments, cwd=DRIVERS)
    assert outcomes(results(tmp_path))["test_pages_read_back"] == ("pass", ""), ran.output


@pytest.mark.long
@pytest.mark.parametrize(
    "driver", [pytest.param("ClearsNothing", marks=pytest.mark.long), "HasAnEmptyClear"]
)
def test_a_clear_that_promises_no_more_than_the_base_class_is_not_declared(
    site, tmp_path, results, driver
):
    case = "test_clear_removes_its_own"
    arguments = (*SGLANG, "--case", case, "--report", str(tmp_path))
    ran = site.hicache(*RUN, f"sample_storage:{driver}", *arguments, cwd=DRIVERS)
    assert outcomes(results(tmp_path))[case] == ("not declared", ""), ran.output


@pytest.mark.long
def test_a_window_has_a_page_at_least_as_the_engine_s_have(site, tmp_path, results):
    case = "test_one_side_pool"
    arguments = (*SGLANG, "--case", case, "--report", str(tmp_path))
    ran = site.hicache(*RUN, "sample_storage:NeedsWindows", *arguments, cwd=DRIVERS)
    assert outcomes(results(tmp_path))[case] == ("pass", ""), ran.output


@pytest.mark.long
def test_a_case_that_ends_the_process_and_one_that_hangs_fail_and_the_others_are_run(
    site, tmp_path, results
):
    cases = [
        part
        for case in (
            "test_keys_stay_inside",
            "test_one_field_differs[model]",
            "test_clear_removes_its_own",
            "test_pages_read_back",
        )
        for part in ("--case", case)
    ]
    ran = site.hicache(
        *RUN,
        "sample_storage:Fragile",
        *SGLANG,
        *cases,
        "--case-seconds",
        "10",
        "--report",
        str(tmp_path),
        cwd=DRIVERS,
    )
    assert ran.status == 1, ran.output
    assert outcomes(results(tmp_path)) == {
        "test_keys_stay_inside": ("fail", "FT-3"),
        "test_clear_removes_its_own": ("fail", "LC-3"),
        "test_one_field_differs[model]": ("pass", ""),
        "test_pages_read_back": ("pass", ""),
    }
    assert "4 cases in" in ran.output


@pytest.mark.long
@pytest.mark.parametrize(
    ("driver", "arguments", "words"),
    [
        (
            "sample_storage:Ends",
            SGLANG,
            "driver 'sample_storage:Ends' cannot be opened: SystemExit: no server",
        ),
        ("sample_storage:Nothing", SGLANG, "cannot import sample_storage:Nothing"),
        ("sample", SGLANG, "'sample' is neither MODULE:CLASS nor one of sglang-file"),
        ("sglang-shm", ("--interface", "sglang"), "there is nothing to judge"),
        (
            "sample_storage:SampleStorage",
            ("--interface", "gelato"),
            "unknown interface 'gelato'; interfaces are sglang, vllm-tier, lmcache-l2",
        ),
    ],
)
def test_what_cannot_be_run_exits_2_and_says_why(site, driver, arguments, words):
    ran = site.hicache(*RUN, driver, *arguments, "--case", "test_holes", cwd=DRIVERS)
    assert ran.status == 2, ran.output
    assert words in " ".join(ran.output.split())


@pytest.mark.long
def test_a_driver_that_refuses_every_page_of_a_size_is_told_so_once(site):
    ran = site.hicache(*RUN, "sample_storage:Blocks", *SGLANG, "--level", "core", cwd=DRIVERS)
    assert ran.status == 2, ran.output
    words = " ".join(ran.output.split())
    assert "it stores no page of 256 bytes, and stores one of 16384" in words
    assert "judge it with --page-bytes 8192" in words
    assert "fail" not in words


@pytest.mark.long
def test_pages_are_as_long_as_the_driver_needs_them(site, tmp_path, results):
    page_bytes = ("--page-bytes", "8KiB")
    arguments = (*SGLANG, *page_bytes, "--level", "core,identity", "--report", str(tmp_path))
    ran = site.hicache(*RUN, "sample_storage:Blocks", *arguments, cwd=DRIVERS)
    assert ran.status == 0, ran.output
    report = results(tmp_path)
    assert report["page_bytes"] == 8192
    assert report["totals"]["fail"] == report["totals"]["untested"] == 0


@pytest.mark.long
def test_the_length_of_pages_goes_into_what_repeats_a_failure(site, tmp_path, results):
    case = ("--page-bytes", "8KiB", "--case", "test_holes")
    ran = site.hicache(
        *RUN, "sample_storage:Compacts", *SGLANG, *case, "--report", str(tmp_path), cwd=DRIVERS
    )
    # A case that is named is shown with its bytes.
    assert "of 16384 bytes differ" in ran.output
    report = results(tmp_path)
    again = next(
        found["reproduce"]
        for rule in report["rules"]
        for found in rule["cases"]
        if found["outcome"] == "fail"
    )
    assert "--page-bytes 8192" in again


@pytest.mark.long
@pytest.mark.parametrize("page_bytes", ["100", "8192000001", "some"])
def test_a_length_that_pages_cannot_have_exits_2(site, page_bytes):
    ran = site.hicache(
        *RUN, "sample_storage:SampleStorage", *SGLANG, "--page-bytes", page_bytes, cwd=DRIVERS
    )
    assert ran.status == 2, ran.output
    assert repr(page_bytes) in ran.output
