"""The manifest, the specification and the cases agree."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest

from hicache_conformance.fixtures.target import (
    CAPACITY,
    DIRECTORY,
    ON_INJECTOR,
    SEVERAL_STORES,
)
from hicache_conformance.interfaces.interface import FOLDERS, interface_of, known
from hicache_conformance.model import CASE_MARK
from hicache_conformance.model.rules import Level, declares, parse_levels, rules, undeclared
from hicache_conformance.suite.driver_conformance import DriverConformance, catalogue
from hicache_storage.spec import Capabilities, Durability, Sharing

SPEC = Path(__file__).parents[2] / "docs" / "spec.md"


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
        for need in set(case.needs) - {CAPACITY, DIRECTORY, SEVERAL_STORES}:
            if not need.startswith(ON_INJECTOR):
                declares(Capabilities(), need)


def test_no_case_hides_another_of_its_name():
    cases = [
        name
        for home in DriverConformance.__mro__
        for name, function in vars(home).items()
        if any(mark.name == CASE_MARK for mark in getattr(function, "pytestmark", ()))
    ]
    assert sorted(cases) == sorted(catalogue())


def _silent_ends(case):
    """Places in a case where it may end and have judged nothing."""
    [function] = ast.parse(textwrap.dedent(inspect.getsource(case))).body
    for node in _own_nodes(function):
        skips = isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.skip"
        if skips or isinstance(node, ast.Return):
            yield f"{case.__qualname__}, line {node.lineno}: {ast.unparse(node)}"


def _own_nodes(node):
    """The nodes of a function, without those of functions inside it, which are callbacks."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield child
            yield from _own_nodes(child)


def test_no_case_skips_itself_or_returns_early():
    cases = [getattr(DriverConformance, name) for name in catalogue()]
    assert [end for case in cases for end in _silent_ends(case)] == []


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


@pytest.mark.parametrize("interface", FOLDERS)
def test_what_is_said_about_an_interface_is_about_what_exists_and_about_each_rule(interface):
    promises = interface_of(interface)
    for entry in promises.entry:
        assert set(entry.rules) <= set(rules())
        assert {name.partition("[")[0] for name in entry.cases} <= set(catalogue())
        assert set(entry.levels) <= set(Level)
        assert set(entry.drivers) <= set(known(interface))
    levels = {level for entry in promises.entry if not entry.declared for level in entry.levels}
    for name, rule in rules().items():
        assert set(rule.levels) <= levels or isinstance(promises.rule("any", name), str)


def test_what_is_said_about_a_driver_comes_before_what_is_said_about_all():
    promises = interface_of("sglang")
    case = ("test_a_hung_store[services]", ("FT-3",), ("faults",))
    assert promises.undeclared("sglang-mooncake", *case) == ""
    assert promises.undeclared("sglang-hf3fs", *case) != ""
