"""Outcomes are never merged, and nothing passes in silence."""

from __future__ import annotations

import pytest

from hicache_conformance.model.outcomes import Case, Outcome, Replay, Verdict
from hicache_conformance.model.rules import Level, rules
from tests.conformance import records
from tests.conformance.records import ended, header


def planned(name, *rules, levels=(Level.CORE,)):
    return Case(
        name=name,
        rules=rules,
        levels=tuple(levels),
        needs=(),
        corrupts=False,
        summary="",
    )


def judged(*outcomes, catalogue=(), undeclared=(), **more):
    planned_cases = catalogue or [
        planned(each.function, *each.rules, levels=map(Level, each.levels)) for each in outcomes
    ]
    known = {case.name: case for case in planned_cases}
    run = header(undeclared=list(undeclared))
    return records.judged(*outcomes, run=run, catalogue=known, **more)


def rule(judgement, name):
    return next(result for result in judgement.rules if result.rule.id == name)


ALL = [ended(f"test_{name}", name) for name, known in rules().items() if Level.CORE in known.levels]
REST = [case for case in ALL if case.rules != ("SET-7",)]
WRONG = {"outcome": Outcome.FAIL, "broken_rule": "GET-1", "reason": "GET-1: wrong"}
BROKE = ended("test_y", "GET-1", outcome=Outcome.ERROR, reason="the suite itself broke")
SILENT = ended("test_silent", "SET-7", "GET-1", checked=("GET-1",))
STOPPED = ended(
    "test_id",
    "ID-1",
    outcome=Outcome.FAIL,
    broken_rule="SET-1",
    reason="SET-1: gone",
    levels=("identity",),
)
LEFT_OUT = [planned(case.case, *case.rules) for case in ALL] + [planned("test_left_out", "GET-1")]
LITTLE = {"levels": [Level.FAULTS], "undeclared": ["evicts"]}
IDENTITY = {"levels": [Level.IDENTITY]}


@pytest.mark.parametrize(
    ("outcomes", "more", "verdict", "name", "outcome", "reason"),
    [
        (ALL, {}, "conformant", "SET-7", "pass", ""),
        # Whatever else: a failure is told before an error.
        (
            [*ALL, ended("test_x", "GET-1", **WRONG), BROKE],
            {},
            "non-conformant",
            "GET-1",
            "fail",
            "GET-1: wrong",
        ),
        ([*ALL, BROKE], {}, "incomplete", "GET-1", "error", "the suite itself broke"),
        (REST, {}, "incomplete", "SET-7", "untested", "no case of this suite tests it yet"),
        ([*REST, SILENT], {}, "incomplete", "SET-7", "untested", "test_silent did not check it"),
        ([*ALL, SILENT], {}, "conformant", "SET-7", "pass", ""),
        (
            ALL,
            {"catalogue": LEFT_OUT},
            "incomplete",
            "GET-1",
            "untested",
            "test_left_out did not run",
        ),
        # A violation of another rule is that rule's failure.
        ([STOPPED], IDENTITY, "non-conformant", "SET-1", "fail", "SET-1: gone"),
        (
            [STOPPED],
            IDENTITY,
            "non-conformant",
            "ID-1",
            "untested",
            "test_id stopped at a violation of SET-1",
        ),
        # What is not declared is not untested.
        (ALL, LITTLE, "incomplete", "EV-1", "not declared", "the driver does not declare evicts"),
        (ALL, LITTLE, "incomplete", "FT-1", "untested", "no case of this suite tests it yet"),
    ],
)
def test_a_verdict_and_the_outcome_of_a_rule(outcomes, more, verdict, name, outcome, reason):
    judgement = judged(*outcomes, **more)
    found = rule(judgement, name)
    assert (judgement.verdict, found.outcome, found.reason) == (verdict, outcome, reason)
    assert found.selected


def test_named_cases_have_passed_and_are_no_verdict():
    run = header(replay=Replay(run="r", options={}, cases=["test_"]))
    judgement = records.judged(*REST, run=run)
    assert judgement.verdict == "incomplete"
    assert judgement.reason.startswith(f"{len(REST)} of {len(REST)} cases that were named passed")
    assert "the suite itself broke" in records.judged(*REST, BROKE, run=run).reason


def test_the_cases_that_have_checked_a_rule_are_counted():
    judgement = judged(*REST, SILENT)
    assert judgement.count(Outcome.PASS) == len(REST)
    counts = [rule(judgement, name).asserting_cases for name in ("SET-7", "GET-1")]
    assert counts == [0, 2]
    assert rule(judged(*ALL, SILENT), "SET-7").asserting_cases == 1


def test_nothing_run_is_never_conformant():
    assert judged().verdict is Verdict.INCOMPLETE
    gone = [ended(case.case, *case.rules, outcome=Outcome.NOT_DECLARED) for case in ALL]
    judgement = judged(*gone)
    assert (judgement.verdict, judgement.reason) == (Verdict.INCOMPLETE, "no rule was tested")


def test_a_run_that_did_not_end_has_no_verdict():
    judgement = judged(*ALL, finished=False)
    assert judgement.verdict is Verdict.INCOMPLETE
    assert judgement.reason == "the run ended before its time"


def test_a_level_needs_a_capability_of_its_own():
    own = ended("test_two_storages", "ID-2", levels=("identity",))
    both = [Level.IDENTITY, Level.SHARED]
    assert rule(judged(own, levels=both, undeclared=["sharing>=processes"]), "ID-2").levels == {
        Level.IDENTITY: Outcome.PASS,
        Level.SHARED: Outcome.NOT_DECLARED,
    }
    assert rule(judged(own, levels=both), "ID-2").levels[Level.SHARED] is Outcome.UNTESTED


def test_levels_are_judged_by_their_own_cases():
    core = ended("test_c", "EX-1")
    pools = ended("test_p", "EX-1", levels=("pools",), outcome=Outcome.FAIL, broken_rule="EX-1")
    assert rule(judged(core, pools, levels=[Level.CORE]), "EX-1").outcome is Outcome.PASS
    both = rule(judged(core, pools, levels=[Level.CORE, Level.POOLS]), "EX-1")
    assert both.levels == {Level.CORE: Outcome.PASS, Level.POOLS: Outcome.FAIL}
    assert both.outcome is Outcome.FAIL
