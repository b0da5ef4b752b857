"""`hicache conformance`, as a user runs it."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from hicache_conformance.model.rules import rules

pytestmark = pytest.mark.slow(seconds=100)

SMOKE = "--profile smoke --seed 5"


@pytest.fixture(scope="module")
def conformant(site):
    """A run of the file driver."""
    return site.judge(f"file --level pools,identity {SMOKE}")


@pytest.fixture(scope="module")
def wrong(site):
    """A run of a driver with a planted fault."""
    return site.judge(f"Rewrites --level core {SMOKE} --run-id same")


def test_a_conformant_driver_exits_0(conformant):
    assert conformant.status == 0, conformant.output
    assert "conformant: every rule" in conformant.output
    assert "seed 5" in conformant.output
    report = conformant.report
    # Without secrets, and without the directory.
    assert report["options"] == {"path": "{tmp}/store", "min_free": "0"}
    assert report["capabilities"]["sharing"] == "processes"
    assert report["driver"]["distribution"] == "hicache-storage"


def test_a_wrong_driver_exits_1(wrong):
    assert wrong.status == 1
    assert re.search(
        r"SET-3: page 0 key 'page0-\w+' of pool 'kv' existed, and a set wrote it anew", wrong.output
    )
    assert re.search(r"non-conformant: breaks .*\bSET-3\b", wrong.output)


@pytest.mark.merge
@pytest.mark.parametrize(
    "cases",
    [
        ("test_large_pages", "test_missing_pages_are_quiet", "test_pages_of_any_bytes"),
        ("test_a_trouble_is_a_miss[disk-full]", "test_a_trouble_is_a_miss[disk-stale]"),
    ],
)
def test_what_a_failing_case_leaves_in_its_directory_fails_no_other_case(site, cases):
    ran = site.judge(f"Poisoned {SMOKE} {' '.join(f'--case {case}' for case in cases)}")
    assert ran.status == 1, ran.output
    found = {name: case["outcome"] for name, case in ran.cases.items()}
    assert found == dict.fromkeys(cases, "pass") | {cases[0]: "fail"}


def test_untested_levels_exit_1(site):
    ran = site.judge(f"memory --level budget --case nothing_is_called_so {SMOKE}")
    assert ran.status == 1
    assert "incomplete: 4 rules untested: EX-10, OB-2, BU-1, BU-2" in ran.output


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nobody", "no driver named 'nobody'"),
        ("memory -c stoer=x", "unknown option 'stoer'; did you mean 'store'?"),
        ("memory -c store", "is not of the form key=value"),
        ("memory --level cor", "unknown level 'cor'"),
        ("memory --profile slow", "unknown profile 'slow'"),
        ("memory --start-server ''", "--start-server needs a command"),
        ('memory --start-server "server \'of"', "No closing quotation"),
        *(
            (f"memory --page-bytes {length}", repr(length))
            for length in ("100", "8192000001", "some")
        ),
        ("a:B --interface gelato", "unknown interface 'gelato'; interfaces are sglang, vllm-tier,"),
        ("a::B --interface sglang", "'a::B' is neither MODULE:CLASS nor one of sglang-file"),
        ("a:B --interface sglang", "No module named 'sglang'"),
        (
            "CannotOpen",
            "driver 'CannotOpen' cannot be opened: ConnectionRefusedError: no server at 127.0.0.1:1",
        ),
        (
            "PromisesMore",
            (
                "driver 'PromisesMore' does not fit the contract: declares 'deletes' without "
                "delete_objects(): implement "
            ),
        ),
    ],
)
def test_what_the_suite_cannot_work_with_exits_2(site, arguments, words):
    ran = site.judge(arguments)
    assert ran.status == 2, ran.output
    assert words in ran.words


def test_a_driver_that_is_not_judged_is_refused_with_the_reason(site):
    ran = site.judge("sglang-shm --interface sglang")
    assert ran.status == 2, ran.output
    assert "there is nothing to judge" in ran.words


@pytest.mark.parametrize(
    ("driver", "rule", "words", "reason"),
    [
        (
            "Dies",
            "LC-3",
            "the driver ended the process with status 3",
            "the driver ended the process",
        ),
        *(
            pytest.param(
                driver,
                "FT-3",
                "on an empty store, batch_get_v2() has not come back after 5 s",
                "the driver hangs in batch_get_v2()",
                marks=[pytest.mark.long] * (driver != "Hangs"),
            )
            # Gets wait for ever: `waits` means that the deadline layer waits too.
            for driver in ("Hangs", "HangsWithTheLock")
        ),
    ],
)
def test_a_driver_that_always_ends_or_hangs_leaves_a_report(site, driver, rule, words, reason):
    ran = site.judge(f"{driver} --level core {SMOKE} --case-seconds 5")
    assert ran.status == 1, ran.output
    assert f"fail {rule}: {words}" in ran.output
    assert ran.report["reason"] == f"breaks {rule}; {reason}"
    assert ran.report["totals"]["fail"] == 1
    [case] = ran.cases.values()
    # No case was begun, and the driver's frames come first.
    assert "--case" not in case["reproduce"]
    assert driver == "Dies" or "in read" in case["detail"].split("File ")[1]
    assert words in (ran.directory / "index.html").read_text("utf-8")


def test_a_crash_costs_one_case_and_is_shown_with_its_signal_and_place(site):
    ran = site.judge(f"AbortsInLargeReads --case test_holes --case test_no_keys {SMOKE}")
    assert ran.status == 1, ran.output
    cases = ran.cases
    crashed = cases.pop("test_holes")
    assert re.fullmatch(
        r"LC-3: the driver ended the process with SIGABRT in read \(drivers_failing.py:\d+\)",
        crashed["reason"],
    )
    assert "os.abort()" in crashed["detail"]
    assert "_pytest" not in crashed["detail"]
    # The others are judged, in another process.
    assert {case["outcome"] for case in cases.values()} == {"pass"}


def test_junit_has_a_suite_for_each_level(conformant, wrong):
    suites = ElementTree.parse(conformant.directory / "junit.xml").getroot()
    assert [suite.get("name") for suite in suites] == ["pools", "identity"]
    assert all(
        suite.get("failures") == suite.get("errors") == suite.get("skipped") == "0"
        for suite in suites
    )
    assert {case.get("classname") for suite in suites for case in suite} <= set(rules())
    (core,) = ElementTree.parse(wrong.directory / "junit.xml").getroot()
    failure = core.find("testcase[@classname='SET-3']/failure")
    assert failure is not None
    assert failure.get("message", "").startswith("fail: SET-3: page 0 key")


def test_the_badge_is_what_shields_asks_for(conformant, wrong):
    assert json.loads((conformant.directory / "badge.json").read_text()) == {
        "schemaVersion": 1,
        "label": "HiCacheStorage v2",
        "message": "conformant (pools, identity)",
        "color": "brightgreen",
    }
    assert json.loads((wrong.directory / "badge.json").read_text())["color"] == "red"


def test_the_page_needs_nothing_else(conformant, wrong):
    for ran in (conformant, wrong):
        page = (ran.directory / "index.html").read_text("utf-8")
        assert not re.search(r"""(src|href)=|url\(|@import|https?://""", page)
        assert all(f"<td>{rule}</td>" in page for rule in rules())
    assert "is <b>non-conformant</b>" in page
    assert "existed, and a set wrote it anew" in page


@pytest.mark.long
def test_the_users_pytest_has_no_say(site, tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -k nothing --no-such-option\n")
    (tmp_path / "conftest.py").write_text("raise RuntimeError('must not be loaded')\n")
    ran = site.judge(f"memory --level core {SMOKE}", cwd=tmp_path, PYTEST_ADDOPTS="-k absent")
    assert ran.status == 0, ran.output
    assert sorted(tmp_path.iterdir()) == [tmp_path / "conftest.py", tmp_path / "pytest.ini"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("rule", "words"), [("GET-1", "test_pages_read_back"), ("EV-3", "(needs evicts)")]
)
def test_explain_says_what_why_and_how(site, rule, words):
    ran = site.hicache("conformance", "explain", rule.lower())
    assert ran.status == 0
    assert all(text in ran.words for text in (rules()[rule].text, rules()[rule].why, words))


@pytest.mark.long
def test_explain_of_no_rule(site):
    ran = site.hicache("conformance", "explain", "GET-99")
    assert ran.status == 2
    assert f"no rule 'GET-99'; rules are {', '.join(rules())}" in ran.words
