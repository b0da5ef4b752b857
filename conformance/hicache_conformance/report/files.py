"""The files of a report: for people (`index.html`, verdict first), for machines, for CI, for a README.

`junit.xml` has one suite for each level and one test for each rule and case, as CI systems show them.
Besides, the test that `adopt` writes, which knows what is expected to fail.
"""

from __future__ import annotations

import json
import re
import textwrap
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from jinja2 import Environment, StrictUndefined, Template

from hicache_conformance.model.outcomes import Case, CaseOutcome, Header, Outcome
from hicache_conformance.model.rules import Level
from hicache_conformance.report.results import (
    SUITE,
    as_json,
    badge,
    installed_version,
    reproduction,
    results,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from hicache_conformance.model.outcomes import Judgement, RuleResult


def write_report(
    directory: Path, header: Header, judgement: Judgement, cases: Mapping[str, Case]
) -> None:
    """Write `results.json`, `junit.xml`, `index.html` and `badge.json` into a directory.

    It is made if need be.
    """
    directory.mkdir(parents=True, exist_ok=True)
    record = results(header, judgement)
    (directory / "results.json").write_text(as_json(record), encoding="utf-8")
    (directory / "badge.json").write_text(as_json(badge(header, judgement)), encoding="utf-8")
    (directory / "junit.xml").write_text(junit(header, judgement), encoding="utf-8")
    (directory / "index.html").write_text(page(header, judgement, cases), encoding="utf-8")


def page(header: Header, judgement: Judgement, cases: Mapping[str, Case]) -> str:
    """The text of the file."""
    return template("index.html.j2").render(
        header=header,
        judgement=judgement,
        outcomes=list(Outcome),
        groups=_groups(header, judgement),
        summaries={case.name: case.summary for case in cases.values()},
    )


@cache
def template(name: str) -> Template:
    """Return a template of this package; what goes into a page of HTML is escaped."""
    environment = Environment(
        # Reasons quote keys and bytes that a driver has answered, and undefined names must not
        # become empty cells.
        autoescape=name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["css"] = lambda outcome: str(outcome).replace(" ", "-")
    # A text as Python has it, with the quotation marks that formatters prefer.
    environment.filters["literal"] = lambda text: json.dumps(text, ensure_ascii=False)
    return environment.from_string(
        files("hicache_conformance.report").joinpath(name).read_text("utf-8")
    )


def _groups(header: Header, judgement: Judgement) -> list[dict[str, object]]:
    """The rules that are broken, as the table has them, each with the cases that say so.

    Cases of a broken rule in which the suite itself broke come last.
    """
    groups = list[dict[str, object]]()
    for result in judgement.rules:
        if result.selected and result.outcome in (Outcome.FAIL, Outcome.ERROR):
            failing = result.failing()
            failing += [
                case
                for case in result.cases
                if case.outcome is Outcome.ERROR and case not in failing
            ]
            cases = [
                (case, reproduction(header, case.case), [str(plan) for plan in case.plans])
                for case in failing
            ]
            groups.append({"rule": result.rule, "outcome": result.outcome, "cases": cases})
    return groups


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


# The test for the repository of a foreign driver
# ------------------------------------------------------------------------------------------------


TEST: Final = "test_hicache_conformance.py"
REQUIREMENTS: Final = "requirements-conformance.txt"
LINE_WIDTH: Final = 98
REASON_WIDTH: Final = 84
_PAGE: Final = re.compile(r"page \d+ key '[^']*'( of pool '\w+')?")


def write_adopted(
    directory: Path,
    engine: str,
    driver: str,
    run: Sequence[Sequence[str]],
    judgement: Judgement,
    unpromised: Collection[str],
) -> list[str]:
    """Write a pytest module and its pinned requirement.

    Args:
        run: arguments of the run that the test makes, by line.
        judgement: of such a run; what it has found broken is expected to fail.
        unpromised: rules that the interface does not promise.

    Returns:
        The rules that are expected to fail.
    """
    bound = [each for each in judgement.rules if each.selected and each.rule.id not in unpromised]
    expected = [
        (each.rule.id, _reason(each), [case.case for case in each.failing()])
        for each in bound
        if each.outcome is Outcome.FAIL
    ]
    text = template("adopted.py.j2").render(
        driver=driver,
        engine=engine,
        name=TEST,
        requirements=REQUIREMENTS,
        run=run,
        expected=expected,
        rules=textwrap.fill(" ".join(each.rule.id for each in bound), LINE_WIDTH),
    )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / TEST).write_text(text, encoding="utf-8")
    # Without what names a commit: an index has no such version.
    version = installed_version(SUITE).partition("+")[0]
    (directory / REQUIREMENTS).write_text(f"{SUITE}[conformance]=={version}\n", encoding="utf-8")
    return [rule for rule, _, _ in expected]


def _reason(result: RuleResult) -> str:
    """What the first failing case says, in a line and without names that differ from run to run."""
    message = _PAGE.sub("a page", result.failing()[0].reason.removeprefix(f"{result.rule.id}: "))
    return textwrap.shorten(message, REASON_WIDTH, placeholder=" ...")
