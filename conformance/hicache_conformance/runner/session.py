"""A pytest session with conformance cases: selects them, and collects their outcomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from hicache_conformance.fixtures.open_context import CAUSE_LOG, INJECTOR, require_driver
from hicache_conformance.interfaces.foreign_storage import process_is_full
from hicache_conformance.model.case import cases_of
from hicache_conformance.model.outcomes import OutcomeStream, StreamWriter
from hicache_conformance.model.pytest_keys import (
    CASE_MARK,
    CASE_PROPERTY,
    GATE_PROPERTY,
    VIOLATION_PROPERTY,
)
from hicache_conformance.model.session_settings import settings_of
from hicache_conformance.model.settings import RunFile
from hicache_conformance.model.verdict import Verdict, judge
from hicache_conformance.model.violation import NotPromised
from hicache_conformance.runner.case_reports import CaseReports, describe_violation, header_of
from hicache_conformance.runner.preflight import check_driver

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_conformance.fixtures.open_context import DriverDeclaration
    from hicache_conformance.model.case import Case
    from hicache_conformance.model.outcomes import CaseOutcome
    from hicache_conformance.model.verdict import Judgement


class Session:
    """Selects cases, gathers what their reports say, and judges at the end.

    Under pytest-xdist the workers select, and the controller gathers and judges.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._run = RunFile.of_environment()
        self.settings = settings_of(config)
        self._writer: StreamWriter | None = None
        self._starts = dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]]()
        self._reports = CaseReports()
        self._streams = dict[str, OutcomeStream]()
        """By class."""
        self._verdicts: dict[str, Judgement] = {}
        # Workers of pytest-xdist run cases and know only their own; the controller gets the reports
        # of all.
        self._is_worker = hasattr(config, "workerinput")
        if self._run is not None:
            self._writer = StreamWriter(Path(self._run.stream))

    def select(self, items: list[pytest.Item], cases: list[pytest.Item]) -> None:
        """Leave the cases of the selected levels in `items`, and give each its report properties.

        Raises:
            pytest.UsageError: a class names no driver, or an option has a bad value.
        """
        for owner in dict.fromkeys(map(_class_of, cases)):
            require_driver(owner)
        deselected = list[pytest.Item]()
        for item in cases:
            owner, mark = _class_of(item), item.get_closest_marker(CASE_MARK)
            assert mark is not None
            rules, levels = tuple(mark.kwargs["rules"]), tuple(map(str, mark.kwargs["levels"]))
            if not self._wants(item, levels):
                deselected.append(item)
                continue
            record = {
                "rules": rules,
                "levels": levels,
                "owner": f"{owner.__module__}.{owner.__qualname__}",
            }
            # A property and not an attribute, because reports are serialized on their way from
            # pytest-xdist's workers to the controller.
            item.user_properties.append((CASE_PROPERTY, json.dumps(record)))
            item.extra_keyword_matches.update(rules)
            self._starts[item.nodeid] = (item.name, rules, levels)
        if deselected:
            items[:] = [item for item in items if item not in deselected]
            self._config.hook.pytest_deselected(items=deselected)
        if self._writer and self._run:
            # Before the driver is opened: where that hangs, the rules are judged by it.
            self._writer.catalogue(cases_of(_class_of(cases[0])))
            check_driver(_class_of(cases[0]), self._config, self._run, self._writer)
            # With those that an earlier process has run, so that the progress bar goes on where it
            # was.
            self._writer.collected(len(cases) - len(deselected) + len(self._run.done))

    def note_violation(self, item: pytest.Item, error: BaseException) -> None:
        """Write into the item's reports which rule was broken.

        The exception itself does not reach the report.
        """
        if isinstance(error, NotPromised):
            item.user_properties.append((GATE_PROPERTY, str(error)))
        record = describe_violation(
            error,
            item.stash.get(CAUSE_LOG, None),
            injects=INJECTOR in getattr(item, "fixturenames", ()) or _corrupts(item),
        )
        if record:
            item.user_properties.append((VIOLATION_PROPERTY, json.dumps(record)))

    def is_over(self) -> bool:
        """Return whether this process has done its share of a run, and another has to go on."""
        return self._run is not None and bool(self._run.interface) and process_is_full()

    def started(self, nodeid: str) -> None:
        """A test begins."""
        if self._writer and nodeid in self._starts:
            self._writer.start(*self._starts[nodeid])

    def reported(self, report: pytest.TestReport) -> None:
        """One of the reports of a case."""
        if self._is_worker:
            return
        done = self._reports.add(report)
        if done:
            owner, outcome = done
            self._gathered(owner, outcome)

    def finish(self, session: pytest.Session) -> None:
        """Judge, and write the report where one is asked for."""
        if self._is_worker:
            return
        if self._writer:
            # Without a footer the run counts as unfinished, and goes on in another process.
            if not session.shouldstop:
                self._writer.footer()
            return
        # Imports all cases, and with them torch.
        from hicache_conformance.suite.driver_conformance import catalogue

        directory = self._config.getoption("--hicache-report")
        for owner, stream in self._streams.items():
            stream.finished = True
            stream.header = header_of(self._reports.contexts.get(owner), self.settings)
            judgement = self._verdicts[owner] = judge(stream, self.settings.levels, catalogue())
            if directory:
                self._write_report(Path(directory), stream, judgement, catalogue())
                if (
                    judgement.verdict is not Verdict.CONFORMANT
                    and session.exitstatus == pytest.ExitCode.OK
                ):
                    session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def summarise(self, terminal: pytest.TerminalReporter) -> None:
        """Print the verdict of each class."""
        for owner, judgement in self._verdicts.items():
            header = self._streams[owner].header
            terminal.section(f"HiCacheStorage v2: {header.driver if header else owner}")
            terminal.line(f"{judgement.verdict}: {judgement.reason}")
            terminal.line(
                f"levels {', '.join(self.settings.levels)}; seed {self.settings.seed}, profile "
                f"{self.settings.profile}"
            )

    def _wants(self, item: pytest.Item, levels: tuple[str, ...]) -> bool:
        if not set(levels) & set(self.settings.levels):
            return False
        wanted = self._run.cases if self._run else []
        begun_before = self._run is not None and item.name in self._run.done
        return not begun_before and (not wanted or any(text in item.name for text in wanted))

    def _gathered(self, owner: str, outcome: CaseOutcome) -> None:
        self._streams.setdefault(owner, OutcomeStream()).outcomes.append(outcome)
        if self._writer:
            self._writer.outcome(outcome)

    def _write_report(
        self,
        directory: Path,
        stream: OutcomeStream,
        judgement: Judgement,
        cases: Mapping[str, Case],
    ) -> None:
        from hicache_conformance.report import write_report

        header = stream.header
        assert header is not None
        several = len(self._streams) > 1
        write_report(directory / header.driver if several else directory, header, judgement, cases)


def _corrupts(item: pytest.Item) -> bool:
    mark = item.get_closest_marker(CASE_MARK)
    return mark is not None and bool(mark.kwargs.get("corrupts"))


def _class_of(item: pytest.Item) -> type[DriverDeclaration]:
    home = item.getparent(pytest.Class)
    assert home is not None
    return cast("type[DriverDeclaration]", home.obj)
