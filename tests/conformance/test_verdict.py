"""Outcomes are never merged, and nothing passes in silence."""

from __future__ import annotations

from hicache_conformance.model.case import Case
from hicache_conformance.model.outcomes import (
    CaseOutcome,
    Header,
    Outcome,
    RunRecord,
)
from hicache_conformance.model.rules import Level
from hicache_conformance.model.verdict import Verdict, judge

CORE = [Level.CORE]


def planned(name, *rules, levels=(Level.CORE,)):
    return Case(
        name=name,
        rules=rules,
        levels=tuple(levels),
        needs=(),
        probes=False,
        corrupts=False,
        summary="",
    )


def ended(name, *rules, outcome=Outcome.PASS, levels=("core",), **fields):
    fields = {"checked": rules, **fields}
    return CaseOutcome(case=name, rules=rules, levels=levels, outcome=outcome, **fields)


def header(**fields):
    return Header(
        driver="d",
        seed=1,
        profile="smoke",
        levels=["core"],
        spec_version="2",
        suite_version="0",
        **fields,
    )


def judged(*outcomes, catalogue=(), levels=CORE, finished=True, undeclared=(), **more):
    known = {
        case.name: case
        for case in catalogue
        or [planned(o.function, *o.rules, levels=map(Level, o.levels)) for o in outcomes]
    }
    record = RunRecord(
        header(undeclared=list(undeclared)),
        outcomes=list(outcomes),
        finished=finished,
        **more,
    )
    return judge(record, levels, known)


def rule(judgement, name):
    return next(result for result in judgement.rules if result.rule.id == name)


def all_core_pass():
    from hicache_conformance.model.rules import rules

    return [
        ended(f"test_{name}", name) for name, known in rules().items() if Level.CORE in known.levels
    ]


def test_all_pass_is_conformant():
    judgement = judged(*all_core_pass())
    assert judgement.verdict is Verdict.CONFORMANT
    assert (
        judgement.count(Outcome.PASS)
        == judgement.count(Outcome.PASS, Level.CORE)
        == len(all_core_pass())
    )


def test_one_fail_is_non_conformant_whatever_else():
    failed = ended(
        "test_x", "GET-1", outcome=Outcome.FAIL, broken_rule="GET-1", reason="GET-1: wrong"
    )
    broke = ended("test_y", "GET-1", outcome=Outcome.ERROR, reason="suite")
    judgement = judged(*all_core_pass(), failed, broke)
    assert judgement.verdict is Verdict.NON_CONFORMANT
    assert (rule(judgement, "GET-1").outcome, rule(judgement, "GET-1").reason) == (
        Outcome.FAIL,
        "GET-1: wrong",
    )


def test_an_error_is_incomplete_and_no_failure():
    judgement = judged(
        *all_core_pass(),
        ended("test_y", "GET-1", outcome=Outcome.ERROR, reason="the suite itself broke"),
    )
    assert judgement.verdict is Verdict.INCOMPLETE
    assert rule(judgement, "GET-1").outcome is Outcome.ERROR


def test_an_untested_rule_is_incomplete():
    judgement = judged(*[case for case in all_core_pass() if case.rules != ("SET-7",)])
    assert judgement.verdict is Verdict.INCOMPLETE
    assert rule(judgement, "SET-7").reason == "no case of this suite tests it yet"


def test_a_rule_that_no_case_has_checked_is_untested():
    silent = ended("test_silent", "SET-7", "GET-1", checked=("GET-1",))
    rest = [case for case in all_core_pass() if case.rules != ("SET-7",)]
    judgement = judged(*rest, silent)
    assert judgement.verdict is Verdict.INCOMPLETE
    assert rule(judgement, "SET-7").reason == "test_silent did not check it"
    assert (rule(judgement, "SET-7").asserting_cases, rule(judgement, "GET-1").asserting_cases) == (
        0,
        2,
    )
    beside = judged(*all_core_pass(), silent)
    assert beside.verdict is Verdict.CONFORMANT
    assert rule(beside, "SET-7").asserting_cases == 1


def test_a_case_that_did_not_run_leaves_its_rules_untested():
    catalogue = [planned(case.case, *case.rules) for case in all_core_pass()] + [
        planned("test_left_out", "GET-1")
    ]
    judgement = judged(*all_core_pass(), catalogue=catalogue)
    assert judgement.verdict is Verdict.INCOMPLETE
    assert rule(judgement, "GET-1").reason == "test_left_out did not run"


def test_nothing_run_is_never_conformant():
    assert judged().verdict is Verdict.INCOMPLETE
    gone = [ended(case.case, *case.rules, outcome=Outcome.NOT_DECLARED) for case in all_core_pass()]
    judgement = judged(*gone)
    assert (judgement.verdict, judgement.reason) == (Verdict.INCOMPLETE, "no rule was tested")


def test_a_rule_that_needs_what_is_not_declared_is_not_untested():
    outcomes = [*all_core_pass(), ended("test_i", "ID-1", levels=("identity",))]
    judgement = judged(*outcomes, levels=[Level.FAULTS], undeclared=["evicts"])
    assert rule(judgement, "EV-1").outcome is Outcome.NOT_DECLARED
    assert rule(judgement, "FT-1").outcome is Outcome.UNTESTED


def test_a_level_needs_a_capability_of_its_own():
    own = ended("test_two_storages", "ID-2", levels=("identity",))
    both = [Level.IDENTITY, Level.SHARED]
    assert rule(judged(own, levels=both, undeclared=["sharing>=processes"]), "ID-2").levels == {
        Level.IDENTITY: Outcome.PASS,
        Level.SHARED: Outcome.NOT_DECLARED,
    }
    assert rule(judged(own, levels=both), "ID-2").levels[Level.SHARED] is Outcome.UNTESTED


def test_a_violation_of_another_rule_is_that_rule_s_failure():
    stopped = ended(
        "test_id",
        "ID-1",
        outcome=Outcome.FAIL,
        broken_rule="SET-1",
        reason="SET-1: gone",
        levels=("identity",),
    )
    judgement = judged(stopped, levels=[Level.IDENTITY])
    assert rule(judgement, "SET-1").outcome is Outcome.FAIL
    assert rule(judgement, "SET-1").selected
    assert rule(judgement, "ID-1").outcome is Outcome.UNTESTED
    assert rule(judgement, "ID-1").reason == "test_id stopped at a violation of SET-1"
    assert judgement.verdict is Verdict.NON_CONFORMANT


def test_levels_are_judged_by_their_own_cases():
    core = ended("test_c", "EX-1")
    pools = ended("test_p", "EX-1", levels=("pools",), outcome=Outcome.FAIL, broken_rule="EX-1")
    assert rule(judged(core, pools, levels=[Level.CORE]), "EX-1").outcome is Outcome.PASS
    both = rule(judged(core, pools, levels=[Level.CORE, Level.POOLS]), "EX-1")
    assert both.levels == {Level.CORE: Outcome.PASS, Level.POOLS: Outcome.FAIL}
    assert both.outcome is Outcome.FAIL


def test_a_run_that_did_not_end_has_no_verdict():
    judgement = judged(*all_core_pass(), finished=False)
    assert judgement.verdict is Verdict.INCOMPLETE
    assert judgement.reason == "the run ended before its time"
