"""A pytest session with conformance cases: selects them, and collects their outcomes.

In the worker of a command line's run, a preflight checks that the driver can be loaded, constructed
and opened.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import pytest

from hicache_conformance.fixtures.context import IDENTITY, NO_LAYERS, DriverSetup, environment_of
from hicache_conformance.fixtures.target import (
    RECORD,
    CaseRecord,
    DriverTarget,
    forget_sandbox,
    settings_of,
)
from hicache_conformance.harness.pools import GuardedPool, slots_of
from hicache_conformance.interfaces.foreign_storage import process_is_full
from hicache_conformance.model import (
    CASE_MARK,
    FULL_STATUS,
    MESSAGE,
    OUTCOME_PROPERTY,
    STARTING_SECONDS,
)
from hicache_conformance.model.case import Inconclusive, NotPromised, Violation, cases_of
from hicache_conformance.model.cause import Cause, cause_of
from hicache_conformance.model.outcomes import (
    DETAIL_LIMIT,
    PREFLIGHT,
    CaseOutcome,
    EndedCase,
    Header,
    Judgement,
    Outcome,
    Replay,
    RunRecord,
    Verdict,
    ended_case,
    judge,
)
from hicache_conformance.model.rules import all_needs, undeclared
from hicache_conformance.model.settings import Settings, port_names, unique_name
from hicache_conformance.report.results import blank_header, describe_interface
from hicache_storage.plugins import create_storage, driver_class, registry
from hicache_storage.spec import (
    Capabilities,
    DriverContractError,
    DriverError,
    HiCacheError,
    HiCacheStorage,
    PoolName,
    PoolTransfer,
)
from hicache_storage.tools.doctor.drivers import check_contract
from hicache_storage.tools.doctor.finding import Status
from hicache_storage.tools.options import TMP, redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from hicache_conformance.harness.process_state import CauseLog


MAX_CAUSES: Final = 3
_SKIP_PREFIX: Final = re.compile(r"^([\w.]*(Skipped|Inconclusive): )?(untested: )?")

# A case ends as the first of these that any of its phases ended as.
_WORST_FIRST: Final = (
    Outcome.FAIL,
    Outcome.ERROR,
    Outcome.UNTESTED,
    Outcome.NOT_DECLARED,
    Outcome.PASS,
)


FINDINGS: Final = pytest.StashKey[list[CaseOutcome]]()
"""What each phase of a case came to so far."""


def violation_finding(
    error: BaseException, log: CauseLog | None = None, *, injects: bool = False
) -> CaseOutcome | None:
    """Describe a violation; None if `error` is, and holds, none.

    Args:
        injects: the case makes the store fail or damages pages, so that faults of the store
            explain nothing.
    """
    violation = next((found for found in _unwrapped(error) if isinstance(found, Violation)), None)
    if violation is None:
        return None
    # An exception group may carry the notes in the place of the violation in it.
    notes = getattr(violation, "__notes__", []) or getattr(error, "__notes__", [])
    message, _, more = str(violation).partition("\n")
    causes = _causes(violation, log, injects=injects)
    sections = [
        *notes,
        *(f"Cause: {cause}\n{cause.traceback}" for cause in causes if cause.traceback),
    ]
    if causes:
        # The exception that a call has raised is quoted by the message itself.
        is_quoted = violation.__cause__ is not None or causes[0].error in message
        if not is_quoted:
            message += f"; answered as a miss: {causes[0]}"
        elif causes[0].place:
            message += f" ({causes[0].place})"
    detail = "\n\n".join(filter(None, [f"{message}\n{more}".rstrip(), *sections]))
    return CaseOutcome(
        outcome=Outcome.FAIL,
        reason=message,
        detail=detail[:DETAIL_LIMIT],
        broken_rule=violation.rule,
        log="\n".join(log.lines) if log else "",
        causes=tuple(causes),
    )


def _causes(violation: Violation, log: CauseLog | None, *, injects: bool) -> list[Cause]:
    """Return the exceptions that explain a violation, the first one first."""
    if violation.__cause__ is not None:
        return [cause_of(violation.__cause__)]
    return [
        cause
        for cause in (log.causes if log else ())
        if not cause.injected and not (injects and cause.expected)
    ][:MAX_CAUSES]


def _unwrapped(error: BaseException) -> Iterator[BaseException]:
    yield error
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        for inner in group.exceptions:
            yield from _unwrapped(inner)


def _finding(
    report: pytest.TestReport, error: BaseException | None, record: CaseRecord, *, injects: bool
) -> CaseOutcome:
    if report.skipped and record.gate:
        return CaseOutcome(
            outcome=Outcome.NOT_DECLARED, reason=record.gate, seconds=report.duration
        )
    if report.skipped:
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = _SKIP_PREFIX.sub("", text)
        return CaseOutcome(outcome=Outcome.UNTESTED, reason=reason, seconds=report.duration)
    if report.passed:
        return CaseOutcome(outcome=Outcome.PASS, seconds=report.duration)
    found = violation_finding(error, record.log, injects=injects) if error is not None else None
    if found is not None:
        return replace(found, seconds=report.duration)
    text = report.longreprtext
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    return CaseOutcome(
        outcome=Outcome.ERROR,
        reason=f"the suite itself broke during {report.when}: {last}",
        detail=text[-DETAIL_LIMIT:],
        seconds=report.duration,
    )


def _outcome(
    name: str, mark: pytest.Mark, findings: list[CaseOutcome], record: CaseRecord
) -> CaseOutcome:
    worst = min(findings, key=lambda finding: _WORST_FIRST.index(finding.outcome))
    rules: tuple[str, ...] = tuple(mark.kwargs["rules"])
    judged = {*record.checks, *([worst.broken_rule] if worst.outcome is Outcome.FAIL else [])}
    checked = tuple(rule for rule in rules if rule in judged or "" in judged)
    if worst.outcome is Outcome.PASS and not checked:
        reason = "the case ended and has checked none of its rules"
        worst = CaseOutcome(outcome=Outcome.UNTESTED, reason=reason)
    return replace(
        worst,
        case=name,
        rules=rules,
        levels=tuple(map(str, mark.kwargs["levels"])),
        checked=checked,
        seconds=round(sum(finding.seconds for finding in findings), 4),
        plans=tuple(record.plans),
    )


class Session:
    """Selects cases, gathers what their reports say, and judges at the end.

    Under pytest-xdist the workers select, and the controller gathers and judges.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.settings = settings_of(config)
        self._records = dict[str, RunRecord]()
        """By class."""
        self._contexts = dict[str, dict[str, Any]]()
        """By class: driver, capabilities and options, from the first case that came as far as
        that."""
        self._verdicts: dict[str, Judgement] = {}
        # Workers of pytest-xdist run cases and know only their own; the controller gets the reports
        # of all.
        self._is_worker = hasattr(config, "workerinput")

    def select(self, items: list[pytest.Item], cases: list[pytest.Item]) -> None:
        """Leave the cases of the selected levels in `items`, and give each its report properties.

        Raises:
            pytest.UsageError: a class names no driver, or an option has a bad value.
        """
        for owner in dict.fromkeys(map(_class_of, cases)):
            if not owner.driver:
                raise pytest.UsageError(
                    f"{owner.__qualname__} names no driver; write: driver = 'the name that "
                    f"`hicache drivers` lists'"
                )
        deselected = list[pytest.Item]()
        for item in cases:
            mark = item.get_closest_marker(CASE_MARK)
            assert mark is not None
            if not self._wants(item, tuple(map(str, mark.kwargs["levels"]))):
                deselected.append(item)
            item.extra_keyword_matches.update(mark.kwargs["rules"])
        if deselected:
            items[:] = [item for item in items if item not in deselected]
            self._config.hook.pytest_deselected(items=deselected)
        if self.settings.home:
            check_driver(_class_of(cases[0]), self._config, self.settings)

    def take_phase(
        self, item: pytest.Item, error: BaseException | None, report: pytest.TestReport
    ) -> None:
        """Note what a phase of a case came to; its last report carries the outcome."""
        owner, record = _class_of(item), item.stash.get(RECORD, CaseRecord())
        if isinstance(error, NotPromised):
            record.gate = str(error)
        mark = item.get_closest_marker(CASE_MARK)
        assert mark is not None
        injects = record.injects or bool(mark.kwargs.get("corrupts"))
        found = item.stash.setdefault(FINDINGS, [])
        found.append(_finding(report, error, record, injects=injects))
        # A fixture that fails at the end decides as much as the call.
        if report.when == "teardown":
            outcome = _outcome(item.name, mark, found, record)
            ended = EndedCase(owner=owner.full_name(), context=record.context, outcome=outcome)
            # A property and not an attribute, because reports are serialized on their way from
            # pytest-xdist's workers to the controller.
            encoded = msgspec.json.encode(ended).decode()
            report.user_properties.append((OUTCOME_PROPERTY, encoded))
        if report.failed:
            forget_sandbox(self._config, owner)
            record.failed = True

    def end_full_process(self) -> None:
        """End a worker that has done its share of a run, so that another one goes on."""
        if self.settings.interface and process_is_full():
            # Flushed by hand, because `os._exit` runs no handlers.
            sys.stdout.flush()
            os._exit(FULL_STATUS)

    def reported(self, report: pytest.TestReport) -> None:
        """One of the reports of a case."""
        ended = None if self._is_worker else ended_case(report)
        if ended:
            if ended.context:
                self._contexts.setdefault(ended.owner, ended.context)
            self._records.setdefault(ended.owner, RunRecord()).outcomes.append(ended.outcome)

    def finish(self, session: pytest.Session) -> None:
        """Judge, and write the report where one is asked for."""
        if self._is_worker:
            return
        from hicache_conformance.suite.driver_conformance import catalogue

        directory = self._config.getoption("--hicache-report")
        for owner, record in self._records.items():
            record.finished = True
            record.header = _header(self._contexts.get(owner), self.settings)
            judgement = self._verdicts[owner] = judge(record, self.settings.levels, catalogue())
            if directory:
                from hicache_conformance.report.files import write_report

                place = Path(directory, *([record.header.driver] if len(self._records) > 1 else []))
                write_report(place, record.header, judgement, catalogue())
                if (
                    judgement.verdict is not Verdict.CONFORMANT
                    and session.exitstatus == pytest.ExitCode.OK
                ):
                    session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def summarise(self, terminal: pytest.TerminalReporter) -> None:
        """Print the verdict of each class."""
        for owner, judgement in self._verdicts.items():
            header = self._records[owner].header
            terminal.section(f"HiCacheStorage v2: {header.driver if header else owner}")
            terminal.line(f"{judgement.verdict}: {judgement.reason}")
            terminal.line(
                f"levels {', '.join(self.settings.levels)}; seed {self.settings.seed}, profile "
                f"{self.settings.profile}"
            )

    def _wants(self, item: pytest.Item, levels: tuple[str, ...]) -> bool:
        if not set(levels) & set(self.settings.levels):
            return False
        wanted = self.settings.cases
        return not wanted or any(text in item.name for text in wanted)


def _header(context: dict[str, Any] | None, settings: Settings) -> Header:
    """The header of a run in the author's own pytest."""
    if context is None:
        return blank_header("unknown", settings)
    options = context["options"]
    given = {name: context[name] for name in ("services", "test_class")}
    return blank_header(
        context["driver"],
        settings,
        capabilities=context["capabilities"],
        options=options,
        replay=Replay(run=settings.run, options=options, **given),
    )


def _class_of(item: pytest.Item) -> type[DriverTarget]:
    home = item.getparent(pytest.Class)
    assert home is not None
    return cast("type[DriverTarget]", home.obj)


OPEN_SECONDS: Final = 25.0
"""Limit for opening an empty store, and for a call of one page on it: below the default deadline of
30 seconds, by which the SDK answers for a driver that hangs."""
FOREIGN_SECONDS: Final = 60.0
"""The same for foreign drivers, which have no such deadline, and may start processes."""


def check_driver(owner: type[DriverTarget], config: pytest.Config, settings: Settings) -> None:
    """Check that a driver can be constructed and opened.

    The controller is told what it is, and which cases there are.

    Args:
        config: pytest's; the servers that are started stay up for the cases.

    Raises:
        pytest.UsageError: that is not possible; the controller has been told why.
    """
    # Before the driver is opened: where that hangs, the rules are judged by it.
    _tell(config, "catalogue", list(cases_of(owner).values()))
    named = f"driver {settings.driver!r}"
    try:
        _open_driver(owner, config, settings)
        return
    except Inconclusive as missing:
        reason = f"{named} cannot be judged: {missing}"
    except DriverContractError as error:
        reason = f"{named} does not fit the contract: {error}"
    except HiCacheError as error:
        what = "cannot be loaded" if isinstance(error, DriverError) else "cannot be opened"
        reason = f"{named} {what}: {error}"
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's driver may raise anything
        reason = f"{named} cannot be opened: {type(error).__name__}: {error}"
    _tell(config, "broken", reason)
    raise pytest.UsageError(reason)


def _tell(config: pytest.Config, kind: str, content: object) -> None:
    """Send a message to the controller of the run."""
    text = msgspec.json.encode(content).decode()
    config.hook.pytest_runtest_logstart(nodeid=MESSAGE, location=(kind, None, text))


def _open_driver(owner: type[DriverTarget], config: pytest.Config, settings: Settings) -> None:
    """Construct, open and close the driver once.

    Raises:
        Exception: that is not possible.
    """
    if not settings.interface:
        # What `hicache doctor` finds out without opening anything: otherwise one method that takes
        # other arguments would be a finding of each rule.
        driver_class(registry().get(settings.driver))
        found = check_contract(settings.driver, Status.FAIL)
        if found.status is Status.FAIL:
            raise DriverContractError(f"{found.detail}: {found.fix}")
    # That of its registration: an instance that hangs says nothing.
    declared = registry().get(settings.driver).capabilities
    header = _first_header(settings, declared)
    _tell(config, "header", header)
    # In the run's directory: it is removed too where the driver hangs and this process is killed.
    with tempfile.TemporaryDirectory(prefix="preflight-", dir=settings.home) as directory:
        options = NO_LAYERS if settings.interface else None
        setup = owner.driver_setup()
        ports = environment_of(config, owner.full_name(), setup.commands()).ports()
        filled = setup.filled(directory, ports, unique_name(settings.run, "preflight"))
        missing_ports = port_names(filled.values())
        if missing_ports:
            raise Inconclusive(
                f"no server listens on {{port:{missing_ports[0]}}}; start one with --start-server"
            )

        def make() -> HiCacheStorage:
            identity = replace(IDENTITY, model="conformance/preflight", salt=settings.run)
            return create_storage(settings.driver, identity, filled, options=options)

        _try_out(make, settings, header, config)


def _try_out(
    make: Callable[[], HiCacheStorage], settings: Settings, header: Header, config: pytest.Config
) -> None:
    """Open a storage, store a page, read it and close.

    Answers are for the cases to judge; only the time counts here. A step that does not end ends
    this process.

    Raises:
        Exception: constructing, registering a pool or opening has raised.
    """
    limit = FOREIGN_SECONDS if settings.interface else OPEN_SECONDS
    seconds = min(limit, settings.case_seconds)

    @contextlib.contextmanager
    def step(rule: str, name: str) -> Generator[None]:
        # What foreign interfaces promise of it is that calls end.
        rule = "FT-3" if settings.interface else rule
        running = CaseOutcome(
            case=PREFLIGHT,
            rules=(rule,),
            levels=settings.levels,
            outcome=Outcome.UNTESTED,
            reason=name,
            seconds=seconds,
        )
        _tell(config, "step", running)
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
        yield

    with step("LC-1", "the constructor"):
        storage = make()
    pool = GuardedPool(pages=2)
    page = PoolTransfer(PoolName.KV, slots_of([0], pool.page_size), keys=["preflight"])
    try:
        with step("LC-1", "register_mem_host_pool_v2()"):
            storage.register_mem_host_pool_v2(pool.host_pool, PoolName.KV)
            storage.on_host_pools_registered()
        with step("LC-1", "open()"):
            storage.open()
        header.capabilities = asdict(storage.capabilities)
        header.undeclared = undeclared(storage.capabilities, all_needs())
        _tell(config, "header", header)
        calls: dict[str, Callable[[], object]] = {
            "batch_set_v2()": lambda: storage.batch_set_v2([page]),
            "batch_exists_v2()": lambda: storage.batch_exists_v2(["preflight"]),
            "batch_get_v2()": lambda: storage.batch_get_v2([page]),
        }
        for name, call in calls.items():
            # What it raises is a finding of the cases.
            with contextlib.suppress(Exception, NotPromised), step("FT-3", name):
                call()
    finally:
        with step("LC-2", "close()"):
            storage.close()
        _tell(config, "step", None)
        faulthandler.dump_traceback_later(STARTING_SECONDS, exit=True, file=2)


def _first_header(settings: Settings, capabilities: Capabilities) -> Header:
    # With `{tmp}` left in: the directory differs from run to run, and reports of equal runs are
    # equal.
    shown = redacted(DriverSetup(settings.driver, settings.config).filled(TMP))
    replay = Replay(
        run=settings.run,
        options=redacted(settings.config),
        services=settings.services,
        interface=settings.interface,
        cases=settings.cases,
    )
    declared = asdict(capabilities)
    header = blank_header(
        settings.driver, settings, capabilities=declared, options=shown, replay=replay
    )
    if settings.interface:
        describe_interface(header)
    return header
