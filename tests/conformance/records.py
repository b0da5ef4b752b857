"""Records of runs that nobody has made, and the verdicts on them."""

from __future__ import annotations

from hicache_conformance.fixtures.context import CaseContext
from hicache_conformance.model.outcomes import CaseOutcome, Header, Outcome, RunRecord, judge
from hicache_conformance.model.rules import Level
from hicache_conformance.model.settings import PROFILES

CORE = [Level.CORE]


def header(**fields):
    run = {"driver": "driver", "seed": 1, "profile": "smoke", "levels": ["core"]}
    return Header(**{**run, "spec_version": "2", "suite_version": "0", **fields})


def ended(name, *rules, outcome=Outcome.PASS, **fields):
    """A case that has checked all its rules, unless told otherwise."""
    known = {"levels": ("core",), "checked": rules, **fields}
    return CaseOutcome(case=name, rules=rules, outcome=outcome, **known)


def case_context(tmp_path, **fields):
    """A context of the driver `file` without injectors, unless told otherwise."""
    known = {"driver": "file", "config": {"path": str(tmp_path / "store")}, "case": "case"}
    places = {"tmp": tmp_path, "sandbox": tmp_path, "unique": "0123456789abcdef"}
    return CaseContext(
        **{**known, **places, "run": "r", "corrupt": lambda *_: False, **fields},
        seed=1,
        profile=PROFILES["smoke"],
    )


def judged(*outcomes, run=None, levels=CORE, catalogue=None, finished=True):
    record = RunRecord(run or header(), outcomes=list(outcomes), finished=finished)
    return judge(record, levels, catalogue or {})
