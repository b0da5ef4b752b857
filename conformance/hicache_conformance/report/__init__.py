"""The files of a report: for people, for machines, for CI, for a README."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.report.junit import junit
from hicache_conformance.report.page import page
from hicache_conformance.report.results import as_json, badge, results

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hicache_conformance.model.outcomes import Case, Header
    from hicache_conformance.model.verdict import Judgement

__all__ = ["write_report"]


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
