"""A test for the repository of a foreign driver: runs the suite, and knows what is expected to fail."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Final

from hicache_conformance.model.outcomes import Outcome
from hicache_conformance.report.files import template
from hicache_conformance.report.header import SUITE, installed_version

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from hicache_conformance.model.verdict import Judgement, RuleResult

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
