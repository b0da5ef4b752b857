"""The files of a report for machines.

`results.json` has everything, in an order that depends on the contract and not on the run;
`badge.json` is what shields.io asks of an endpoint.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hicache_conformance.model.outcomes import (
    PREFLIGHT,
    CaseOutcome,
    Header,
    Judgement,
    Outcome,
    RuleResult,
    Verdict,
)
from hicache_conformance.model.rules import Level
from hicache_conformance.model.settings import mentions_tmp, port_names

if TYPE_CHECKING:
    from collections.abc import Mapping


SCHEMA: Final = 1
"""Raised when a field changes its meaning or goes; new fields do not raise it."""
COLOURS: Final = {
    Verdict.CONFORMANT: "brightgreen",
    Verdict.NON_CONFORMANT: "red",
    Verdict.INCOMPLETE: "orange",
}


def results(header: Header, judgement: Judgement) -> dict[str, Any]:
    """A run as plain values."""
    name, _, version = header.distribution.partition(" ")
    return {
        "schema": SCHEMA,
        "contract": "HiCacheStorage",
        "spec_version": header.spec_version,
        "suite_version": header.suite_version,
        "driver": {
            "name": header.driver,
            "distribution": name,
            "version": version,
            "files": asdict(header.files),
        },
        "capabilities": header.capabilities,
        "options": header.options,
        "environment": header.environment,
        "seed": header.seed,
        "profile": header.profile,
        "page_bytes": header.page_bytes,
        "levels": header.levels,
        "verdict": str(judgement.verdict),
        "reason": judgement.reason,
        "totals": {str(outcome): judgement.count(outcome) for outcome in Outcome},
        "totals_by_level": {
            str(level): {str(outcome): judgement.count(outcome, level) for outcome in Outcome}
            for level in Level
            if level in header.levels
        },
        "interface": header.interface,
        # What `hicache conformance verify` reads, beyond what stands above.
        "replay": header.replay and asdict(header.replay),
        "shared_causes": [
            {"cause": asdict(shared.cause), "rules": shared.rules}
            for shared in judgement.shared_causes()
        ],
        # All rules, those that were not selected included, so that two files always have the same
        # rows.
        "rules": [_rule(header, result) for result in judgement.rules],
    }


def badge(header: Header, judgement: Judgement) -> dict[str, Any]:
    """A verdict and its levels; never a percentage, because a driver does not conform by 97%."""
    levels, failed = header.levels, judgement.count(Outcome.FAIL)
    named = "all levels" if len(levels) == len(Level) else ", ".join(levels)
    # What is broken is told in the place of the levels; shields.io shows one line.
    detail = f"{failed} rules broken" if failed else named
    return {
        "schemaVersion": 1,
        "label": f"HiCacheStorage v{header.spec_version}",
        "message": f"{judgement.verdict} ({detail})",
        "color": COLOURS[judgement.verdict],
    }


def as_json(record: dict[str, Any]) -> str:
    """The text of a file."""
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def reproduction(header: Header, case: str) -> str:
    """The command that runs one case again."""
    replay, parts = header.replay, ["hicache", "conformance", "run", header.driver]
    options = header.options
    if replay is not None and replay.interface:
        parts += ["--interface", replay.interface]
        # The others are those of the driver's name.
        options = replay.options
    for name, value in options.items():
        parts += ["-c", f"{name}={value}"]
    if replay is not None:
        for command in replay.services or ():
            parts += ["--start-server", command]
    parts += ["--seed", str(header.seed)]
    if case != PREFLIGHT:
        parts += ["--case", case]
    if replay is not None and store_is_fresh(header.capabilities, header.options):
        # The names of its pages are chance too.
        parts += ["--run-id", replay.run]
    if header.page_bytes:
        parts += ["--page-bytes", str(header.page_bytes)]
    if header.profile != "default":
        parts += ["--profile", header.profile]
    return shlex.join(parts)


def store_is_fresh(capabilities: Mapping[str, object], options: Mapping[str, object]) -> bool:
    """Return whether each run of a driver begins with an empty store.

    Then no page of an earlier run is found.
    """
    texts = list(options.values())
    return (
        capabilities.get("durability") in ("none", "reopen")
        or mentions_tmp(texts)
        or bool(port_names(texts))
    )


def _rule(header: Header, result: RuleResult) -> dict[str, Any]:
    return {
        "id": result.rule.id,
        "text": result.rule.text,
        "level": [str(level) for level in result.rule.levels],
        "needs": result.rule.needs,
        "selected": result.selected,
        "outcome": str(result.outcome),
        # By level as well, since one rule may hold in one process and fail between two.
        "outcome_by_level": {str(level): str(outcome) for level, outcome in result.levels.items()},
        "reason": result.reason,
        "asserting_cases": result.asserting_cases,
        "seconds": round(result.seconds, 3),
        "cases": [_case(header, case) for case in result.cases],
    }


def _case(header: Header, case: CaseOutcome) -> dict[str, Any]:
    return {
        "name": case.case,
        "outcome": str(case.outcome),
        "checked": list(case.checked),
        "reason": case.reason,
        "detail": case.detail,
        "broken_rule": case.broken_rule,
        "causes": msgspec.to_builtins(case.causes),
        "plans": msgspec.to_builtins(case.plans),
        "reproduce": reproduction(header, case.case)
        if case.outcome in (Outcome.FAIL, Outcome.ERROR)
        else "",
        "seconds": case.seconds,
    }
