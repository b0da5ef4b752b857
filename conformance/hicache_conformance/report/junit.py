"""`junit.xml`: one suite for each level, one test for each rule and case.

As CI systems show them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from hicache_conformance.model.outcomes import CaseOutcome, Header, Outcome
from hicache_conformance.model.rules import Level

if TYPE_CHECKING:
    from hicache_conformance.model.verdict import Judgement, RuleResult

_TAGS: Final = {
    Outcome.FAIL: "failure",
    Outcome.ERROR: "error",
    Outcome.UNTESTED: "skipped",
    Outcome.NOT_DECLARED: "skipped",
}
# What XML 1.0 cannot hold, not even escaped.
_ILLEGAL: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(header: Header, judgement: Judgement) -> str:
    """The text of the file."""
    root = Element("testsuites", name=f"HiCacheStorage v{header.spec_version}: {header.driver}")
    for level in Level:
        if level in header.levels:
            _suite(root, level, [result for result in judgement.rules if level in result.levels])
    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(root: Element, level: Level, results: list[RuleResult]) -> None:
    suite = SubElement(root, "testsuite", name=str(level))
    for result in results:
        cases = [case for case in result.cases if level in case.levels]
        # A case of several rules and levels stands in each; CI systems group by class name, which
        # is the rule.
        for case in cases:
            _case(suite, result, case.case, case.outcome, case)
        # Otherwise an untested rule would not show at all.
        if not cases:
            _case(suite, result, "no case", result.levels[level], None)
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite)))
    suite.set("time", f"{sum(float(case.get('time', '0')) for case in suite):.3f}")


def _case(
    suite: Element, result: RuleResult, name: str, outcome: Outcome, case: CaseOutcome | None
) -> None:
    seconds = case.seconds if case else 0.0
    element = SubElement(
        suite, "testcase", classname=result.rule.id, name=name, time=f"{seconds:.3f}"
    )
    properties = SubElement(element, "properties")
    SubElement(properties, "property", name="rule", value=result.rule.id)
    SubElement(properties, "property", name="outcome", value=str(outcome))
    if outcome in _TAGS:
        reason = (case.reason if case else result.reason) or str(outcome)
        told = SubElement(
            element, _TAGS[outcome], message=_ILLEGAL.sub("?", f"{outcome}: {reason}")
        )
        if case and case.detail:
            told.text = _ILLEGAL.sub("?", case.detail)
