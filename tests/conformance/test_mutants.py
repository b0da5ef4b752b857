"""Drivers with one planted fault each are found out, by the rule that they break.

Right drivers are not blamed.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache_conformance.model.rules import rules
from hicache_storage.spec import IDENTITY_FIELDS

# All samples run in the first test's fixture.
pytestmark = pytest.mark.merge

sys.path.insert(0, str(Path(__file__).with_name("mutants")))

from drivers_plugin import SAMPLES

SEED = int(os.environ.get("HICACHE_SEED", "1"))
"""A change of the suite is tried with more than one."""
OWN = ["memory"]
"""The project's own drivers, which have to be conformant; `make conformance` and `make matrix`
judge those with a store."""
RIGHT = [name for name, sample in SAMPLES.items() if not sample.breaks]
WRONG = [name for name, sample in SAMPLES.items() if sample.breaks]
PROCESSES = 4
"""Processes that the mutants are shared among: they spend six sevenths of the time waiting for what
hangs, recovers or is killed."""


@pytest.fixture(scope="module")
def reports(site, results, tmp_path_factory):
    """`results.json` of every sample.

    Mutants with the cases of the rules that they break, right drivers with all cases.
    """
    directory = tmp_path_factory.mktemp("reports")
    shares = [WRONG[number::PROCESSES] for number in range(PROCESSES)]

    def run(number, drivers):
        ran = site.samples(drivers, SEED, directory / str(number), seconds=900)
        # Right drivers that promise little, or leave something out, are not blamed and yet no
        # reason for status 0.
        assert ran.status == (drivers is not OWN), ran.output[-3000:]

    runs = [OWN, RIGHT, *shares]
    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(run, range(len(runs)), runs))
    found = [results(path.parent) for path in directory.glob("*/report/**/results.json")]
    return {report["driver"]["name"]: report for report in found}


def _failed(report):
    return {rule["id"] for rule in report["rules"] if rule["outcome"] == "fail"}


def _messages(report):
    return {
        case["detail"]
        for rule in report["rules"]
        for case in rule["cases"]
        if case["outcome"] == "fail"
    }


@pytest.mark.parametrize("name", WRONG)
def test_a_planted_fault_is_found(reports, name):
    report, sample = reports[name], SAMPLES[name]
    assert report["verdict"] == "non-conformant"
    assert set(sample.breaks) <= _failed(report)
    assert any(sample.message in message for message in _messages(report)), _messages(report)


@pytest.mark.parametrize("name", [*SAMPLES, *OWN])
def test_a_driver_s_fault_is_not_the_suite_s(reports, name):
    errors = [
        case
        for rule in reports[name]["rules"]
        for case in rule["cases"]
        if case["outcome"] == "error"
    ]
    assert not errors


@pytest.mark.parametrize("name", [*RIGHT, *OWN])
def test_a_right_driver_is_not_blamed(reports, name):
    assert not _messages(reports[name])


@pytest.mark.parametrize("name", OWN)
def test_the_project_s_own_drivers_conform(reports, name):
    report = reports[name]
    assert report["verdict"] == "conformant", [
        (rule["id"], rule["outcome"], rule["reason"])
        for rule in report["rules"]
        if rule["outcome"] not in ("pass", "not declared")
    ]


def test_without_a_way_to_damage_a_page_the_verdict_is_incomplete(reports):
    report = reports["Plain"]
    assert report["verdict"] == "incomplete"
    rules = {rule["id"]: rule for rule in report["rules"] if rule["outcome"] == "untested"}
    untested = {
        case["reason"]
        for name in ("GET-5", "GET-7", "EX-9", "SET-3")
        for case in rules[name]["cases"]
        if case["outcome"] == "untested"
    }
    assert untested
    assert all("no way to damage a page" in reason for reason in untested)


def test_checksums_left_out_are_no_fault_and_no_conformance(reports):
    report = reports["LeavesChecksumsOut"]
    assert report["verdict"] == "incomplete"
    reason = next(rule["reason"] for rule in report["rules"] if rule["id"] == "GET-5")
    assert "leave checksums unverified" in reason


def test_undeclared_rules_stand_apart(reports):
    outcomes = {rule["id"]: rule["outcome"] for rule in reports["PromisesNothing"]["rules"]}
    assert outcomes["ID-2"] == outcomes["LC-4"] == outcomes["FT-5"] == "not declared"


def test_every_field_of_the_identity_has_a_case_that_bites(reports):
    rule = next(rule for rule in reports["IgnoresIdentity"]["rules"] if rule["id"] == "ID-1")
    fields = {
        case["name"]: case["outcome"]
        for case in rule["cases"]
        if case["name"].startswith("test_one_field_differs")
    }
    # The sample has to look at the salt to tell one case from the next, and its salts differ.
    fields.pop("test_one_field_differs[salt]")
    # Without the salt, and three fields about pools, which have cases of their own.
    assert len(fields) == len(IDENTITY_FIELDS) - 4
    assert set(fields.values()) == {"fail"}


def test_every_rule_is_broken_by_some_control():
    assert set().union(*(sample.breaks for sample in SAMPLES.values())) == set(rules())
