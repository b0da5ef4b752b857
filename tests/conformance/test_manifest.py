"""The manifest, the specification and the cases agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hicache_conformance.fixtures.open_context import (
    CAPACITY,
    DIRECTORY,
    ON_INJECTOR,
    SEVERAL_STORES,
    STEPS,
)
from hicache_conformance.model.rules import Level, declares, parse_levels, rules, undeclared
from hicache_conformance.suite.driver_conformance import catalogue
from hicache_storage.spec import Capabilities, Durability, Sharing

SPEC = Path(__file__).parents[2] / "docs" / "spec.md"
FIRST_HALF = (Level.CORE, Level.POOLS, Level.IDENTITY)


def test_ids_are_those_of_the_specification():
    published = re.findall(r"^- \*\*([A-Z]+-\d+)\*\*", SPEC.read_text("utf-8"), re.MULTILINE)
    assert list(rules()) == published


def test_every_rule_says_what_and_why():
    for rule in rules().values():
        assert rule.levels, rule.id
        assert rule.text.endswith("."), rule.id
        assert len(rule.why) > 40, rule.id
        declares(Capabilities(), rule.needs)


def test_cases_cite_rules_that_exist_and_levels_that_they_have():
    for case in catalogue().values():
        assert case.rules, case.name
        assert case.summary, case.name
        # A rule counts in its own levels and wherever it was met broken; but a case has to be at
        # home in a level of one of its rules.
        assert set(case.levels) & {
            level for rule in case.rules for level in rules()[rule].levels
        }, case.name
        for need in set(case.needs) - {CAPACITY, DIRECTORY, SEVERAL_STORES, STEPS}:
            if not need.startswith(ON_INJECTOR):
                declares(Capabilities(), need)


@pytest.mark.parametrize("level", FIRST_HALF)
def test_no_rule_of_the_first_half_is_without_a_case(level):
    for rule in rules().values():
        if level in rule.levels:
            cases = [
                case
                for case in catalogue().values()
                if rule.id in case.rules and level in case.levels
            ]
            assert cases, f"{rule.id} has no case in level {level}"


def test_no_case_skips_itself_or_returns_early():
    for path in (Path(__file__).parents[2] / "conformance" / "hicache_conformance" / "cases").glob(
        "*.py"
    ):
        text = path.read_text("utf-8")
        assert "pytest.skip" not in text, path.name
        for body in re.findall(
            r"    def test_.*?(?=\n    @|\n    def |\n\n\n|\Z)", text, re.DOTALL
        ):
            assert not re.search(r"^        return\b", body, re.MULTILINE), (
                f"{path.name}: {body.splitlines()[0]}"
            )


def test_capabilities_are_read_as_text():
    shared = Capabilities(sharing=Sharing.PROCESS, durability=Durability.MACHINE, clears=True)
    assert undeclared(shared, ["sharing>=process", "durability>=process", "clears"]) == []
    assert undeclared(shared, ["sharing>=processes", "deletes"]) == [
        "sharing>=processes",
        "deletes",
    ]
    for nonsense in ("shares", "sharing", "clears>=yes", "sharing>=everyone"):
        with pytest.raises(ValueError, match=r"names no capability|is not a valid"):
            declares(shared, nonsense)


def test_levels_are_read_as_text():
    assert parse_levels("identity, core") == (Level.CORE, Level.IDENTITY)
    assert parse_levels("all") == parse_levels("") == tuple(Level)
    with pytest.raises(ValueError, match="unknown level 'corre'"):
        parse_levels("corre")
