"""`hicache conformance`, as a user runs it."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from hicache_conformance.model.rules import rules

pytestmark = pytest.mark.slow(seconds=100)

RUN = ("conformance", "run")
SMOKE = ("--profile", "smoke", "--seed", "5")


@pytest.fixture(scope="module")
def conformant(site, tmp_path_factory):
    """A run of the file driver, with a report."""
    directory = tmp_path_factory.mktemp("report")
    return site.hicache(
        *RUN, "file", "--level", "pools,identity", *SMOKE, "--report", str(directory)
    ), directory


@pytest.fixture(scope="module")
def wrong(site, tmp_path_factory):
    """A run of a driver with a planted fault, with a report."""
    directory = tmp_path_factory.mktemp("report")
    return _run_wrong(site, directory), directory


def _run_wrong(site, directory):
    options = ("--level", "core", *SMOKE, "--run-id", "same", "--report", str(directory))
    return site.hicache(*RUN, "Rewrites", *options)


def test_a_conformant_driver_exits_0(conformant):
    ran, _ = conformant
    assert ran.status == 0, ran.output
    assert "conformant: every rule" in ran.output
    assert "seed 5" in ran.output


def test_a_wrong_driver_exits_1(wrong):
    ran, _ = wrong
    assert ran.status == 1
    assert re.search(
        r"SET-3: page 0 key 'page0-\w+' of pool 'kv' existed, and a set wrote it anew", ran.output
    )
    assert re.search(r"non-conformant: breaks .*\bSET-3\b", ran.output)


@pytest.mark.parametrize(
    ("driver", "cases"),
    [
        (
            "Poisoned",
            ("test_large_pages", "test_missing_pages_are_quiet", "test_stored_pages_stay"),
        ),
        (
            "PoisonedByAFullDisk",
            ("test_a_trouble_is_a_miss[disk-full]", "test_a_trouble_is_a_miss[disk-stale]"),
        ),
    ],
)
def test_what_a_failing_case_leaves_in_its_directory_fails_no_other_case(
    site, tmp_path, results, driver, cases
):
    chosen = [part for case in cases for part in ("--case", case)]
    ran = site.hicache(*RUN, driver, *SMOKE, *chosen, "--report", str(tmp_path))
    assert ran.status == 1, ran.output
    found = {
        case["name"]: case["outcome"]
        for rule in results(tmp_path)["rules"]
        for case in rule["cases"]
    }
    assert found == dict.fromkeys(cases, "pass") | {cases[0]: "fail"}


def test_untested_levels_exit_1(site):
    ran = site.hicache(
        *RUN, "memory", "--level", "budget", "--case", "nothing_is_called_so", *SMOKE
    )
    assert ran.status == 1
    assert "incomplete: 4 rules untested: EX-10, OB-2, BU-1, BU-2" in ran.output


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nobody",), "no driver named 'nobody'"),
        (("memory", "-c", "stoer=x"), "unknown option 'stoer'; did you mean 'store'?"),
        (("memory", "-c", "store"), "is not of the form key=value"),
        (("memory", "--level", "cor"), "unknown level 'cor'"),
        (("memory", "--profile", "slow"), "unknown profile 'slow'"),
        (
            ("CannotOpen",),
            "driver 'CannotOpen' cannot be opened: ConnectionRefusedError: no server at 127.0.0.1:1",
        ),
        (
            ("TakesLess",),
            (
                "driver 'TakesLess' does not fit the contract: TakesLess.read_objects() does not take "
                "the contract's arguments: def read_objects("
            ),
        ),
        (("TakesLess",), "declares 'deletes' without delete_objects(): implement "),
    ],
)
def test_what_the_suite_cannot_work_with_exits_2(site, arguments, words):
    ran = site.hicache(*RUN, *arguments)
    assert ran.status == 2, ran.output
    assert words in ran.output.replace("\n", " ")


def test_a_driver_that_always_ends_the_process_leaves_a_report(site, tmp_path, results):
    ran = site.hicache(*RUN, "Dies", "--level", "core", *SMOKE, "--report", str(tmp_path))
    assert ran.status == 1, ran.output
    assert "fail LC-3: the driver ended the process with status 3" in ran.output
    report = results(tmp_path)
    assert report["reason"] == "breaks LC-3; the driver ended the process"
    assert report["totals"]["fail"] == 1
    assert "ended the process with status 3" in (tmp_path / "index.html").read_text("utf-8")


def test_a_crash_costs_one_case_and_is_shown_with_its_signal_and_place(site, tmp_path, results):
    arguments = ("--case", "test_holes", "--case", "test_no_keys")
    ran = site.hicache(*RUN, "AbortsInLargeReads", *arguments, *SMOKE, "--report", str(tmp_path))
    assert ran.status == 1, ran.output
    cases = {case["name"]: case for rule in results(tmp_path)["rules"] for case in rule["cases"]}
    crashed = cases.pop("test_holes")
    assert re.fullmatch(
        r"LC-3: the driver ended the process with SIGABRT in read \(drivers_failing.py:\d+\)",
        crashed["reason"],
    )
    assert "os.abort()" in crashed["detail"]
    assert "_pytest" not in crashed["detail"]
    # The others are judged, in another process.
    assert {case["outcome"] for case in cases.values()} == {"pass"}


@pytest.mark.parametrize(
    "driver", ["Hangs", pytest.param("HangsWithTheLock", marks=pytest.mark.long)]
)
def test_a_driver_that_hangs_is_ended(site, tmp_path, results, driver):
    # Its gets wait for ever: `waits` means that the deadline layer waits too.
    ran = site.hicache(
        *RUN, driver, "--level", "core", *SMOKE, "--case-seconds", "5", "--report", str(tmp_path)
    )
    assert ran.status == 1
    assert "FT-3: on an empty store, batch_get_v2() has not come back after 5 s" in ran.output
    assert results(tmp_path)["reason"] == "breaks FT-3; the driver hangs in batch_get_v2()"


@pytest.mark.long
def test_results_are_the_same_for_the_same_seed(site, wrong, results, tmp_path):
    def comparable(directory):
        report = results(directory)
        for rule in report["rules"]:
            rule["seconds"] = 0
            for case in rule["cases"]:
                case["seconds"] = 0
                if "test_many_" in case["name"]:
                    # Threads meet as they like; that the fault is found does not change, the moment
                    # does.
                    case["reason"] = case["detail"] = ""
                    rule["reason"] = ""
        return report

    _run_wrong(site, tmp_path)
    first, second = comparable(wrong[1]), comparable(tmp_path)
    assert first == second
    assert first["driver"].pop("files")["count"] > 0
    assert first["driver"] == {
        "name": "Rewrites",
        "distribution": "hicache-samples",
        "version": "1.0",
    }


def test_one_case_can_be_run_again(wrong, site, results):
    failing = next(
        case
        for rule in results(wrong[1])["rules"]
        for case in rule["cases"]
        if case["outcome"] == "fail"
    )
    page = (wrong[1] / "index.html").read_text("utf-8")
    command = next(
        line
        for line in re.findall(r"<pre>(hicache conformance run [^<]*)", page)
        if failing["name"] in line
    )
    arguments = [part.strip("'") for part in command.replace("&#39;", "'").split()[1:]]
    ran = site.hicache(*arguments)
    assert ran.status == 1
    assert failing["reason"] in ran.output


def test_junit_has_a_suite_for_each_level(conformant, wrong):
    suites = ElementTree.parse(conformant[1] / "junit.xml").getroot()
    assert [suite.get("name") for suite in suites] == ["pools", "identity"]
    assert all(
        suite.get("failures") == suite.get("errors") == suite.get("skipped") == "0"
        for suite in suites
    )
    assert {case.get("classname") for suite in suites for case in suite} <= set(rules())
    (core,) = ElementTree.parse(wrong[1] / "junit.xml").getroot()
    failure = core.find("testcase[@classname='SET-3']/failure")
    assert failure is not None
    assert failure.get("message", "").startswith("fail: SET-3: page 0 key")


def test_the_badge_is_what_shields_asks_for(conformant, wrong):
    assert json.loads((conformant[1] / "badge.json").read_text()) == {
        "schemaVersion": 1,
        "label": "HiCacheStorage v2",
        "message": "conformant (pools, identity)",
        "color": "brightgreen",
    }
    assert json.loads((wrong[1] / "badge.json").read_text())["color"] == "red"


def test_the_page_needs_nothing_else(conformant, wrong):
    for _, directory in (conformant, wrong):
        page = (directory / "index.html").read_text("utf-8")
        assert not re.search(r"""(src|href)=|url\(|@import|https?://""", page)
        assert all(f"<td>{rule}</td>" in page for rule in rules())
    assert "is <b>non-conformant</b>" in page
    assert "existed, and a set wrote it anew" in page


def test_options_are_shown_without_secrets_and_without_the_directory(conformant, results):
    report = results(conformant[1])
    assert report["options"] == {"path": "{tmp}/store"}
    assert report["capabilities"]["sharing"] == "processes"
    assert report["driver"]["distribution"] == "hicache-storage"


@pytest.mark.long
def test_the_users_pytest_has_no_say(site, tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -k nothing --no-such-option\n")
    (tmp_path / "conftest.py").write_text("raise RuntimeError('must not be loaded')\n")
    ran = site.hicache(
        *RUN, "memory", "--level", "core", *SMOKE, cwd=tmp_path, PYTEST_ADDOPTS="-k absent"
    )
    assert ran.status == 0, ran.output
    assert sorted(tmp_path.iterdir()) == [tmp_path / "conftest.py", tmp_path / "pytest.ini"]


@pytest.mark.long
@pytest.mark.parametrize("rule", ["GET-1", "EV-3"])
def test_explain_says_what_why_and_how(site, rule):
    ran = site.hicache("conformance", "explain", rule.lower())
    words = " ".join(ran.output.split())
    assert ran.status == 0
    assert rules()[rule].text in words
    assert rules()[rule].why in words
    assert {"GET-1": "test_pages_read_back", "EV-3": "(needs evicts)"}[rule] in words


@pytest.mark.long
def test_explain_of_no_rule(site):
    ran = site.hicache("conformance", "explain", "GET-99")
    assert ran.status == 2
    assert "no rule 'GET-99'" in ran.output


@pytest.mark.long
def test_rules_lists_all(site):
    output = site.hicache("conformance", "rules").output
    assert all(re.search(rf"^{rule} ", output, re.MULTILINE) for rule in rules())
    assert "GET-1 " not in site.hicache("conformance", "rules", "--level", "budget").output
