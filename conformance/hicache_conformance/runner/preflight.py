"""Preflight of a command-line run: checks that the driver can be loaded, constructed and opened.

A foreign driver must also store pages of the run's length, or of none.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from hicache_conformance.fixtures.context import NO_LAYERS
from hicache_conformance.fixtures.environment import commands_of, environment_of
from hicache_conformance.fixtures.open_context import filled_config
from hicache_conformance.harness.pools import GuardedPool, page_components, slots_of
from hicache_conformance.interfaces.profile import describe_interface
from hicache_conformance.model.cause import stack_of, stacks_in_driver
from hicache_conformance.model.outcomes import (
    DETAIL_LIMIT,
    PREFLIGHT,
    CaseOutcome,
    Outcome,
    Replay,
)
from hicache_conformance.model.settings import port_names, unique_name
from hicache_conformance.model.violation import Inconclusive, NotPromised
from hicache_conformance.report.header import blank_header
from hicache_storage.plugins import create_storage, driver_class, registry
from hicache_storage.spec import (
    DriverContractError,
    DriverError,
    HiCacheError,
    PoolName,
    PoolTransfer,
    StorageIdentity,
)
from hicache_storage.tools.doctor.drivers import check_class
from hicache_storage.tools.doctor.finding import Status
from hicache_storage.tools.options import TMP, redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hicache_conformance.fixtures.open_context import DriverDeclaration
    from hicache_conformance.model.outcomes import Header, StreamWriter
    from hicache_conformance.model.settings import RunFile
    from hicache_storage.spec import Capabilities, HiCacheStorage

OPEN_SECONDS: Final = 25.0
"""Limit for opening an empty store, and for a call of one page on it: below the default deadline of
30 seconds, by which the SDK answers for a driver that hangs."""
FOREIGN_SECONDS: Final = 60.0
"""The same for foreign drivers, which have no such deadline, and may start processes."""
USUAL_PAGE: Final = (96, 160)
"""Bytes of the components of the cases' usual page."""
PROBED_UNITS: Final = (8 << 10, 64 << 10, 1 << 20)
"""Page lengths, in bytes, that a driver is tried with when it has refused the usual one."""
PROBE_SECONDS: Final = 20.0
CASE_SHARE: Final = 0.8
"""Of a case's time. The process that follows the run counts from the first of these calls, and must
not be the first to end it: it knows less about what hangs."""


def check_driver(
    owner: type[DriverDeclaration], config: pytest.Config, run: RunFile, writer: StreamWriter
) -> None:
    """Construct, open and close the driver once, and write the header of the run.

    Args:
        owner: the class that the run collected.
        config: pytest's; the servers that the driver needs stay up for its cases.
        run: what was asked for.
        writer: where the header goes.

    Raises:
        pytest.UsageError: that is not possible; the reason has been written down.
    """
    try:
        if not run.interface:
            _check_class(run.driver)
        # In the run's directory: it is removed too where the driver hangs and this process is killed.
        home = Path(run.stream).parent
        with tempfile.TemporaryDirectory(prefix="preflight-", dir=home) as directory:
            options = NO_LAYERS if run.interface else None
            commands = commands_of(owner.driver, owner.config, owner.services)
            name = f"{owner.__module__}.{owner.__qualname__}"
            ports = environment_of(config, name, commands).ports()
            unique = unique_name(run.settings.run, "preflight")
            filled = filled_config(run.driver, run.config, directory, ports, unique)
            missing_ports = port_names(filled.values())
            if missing_ports:
                raise Inconclusive(
                    f"no server listens on {{port:{missing_ports[0]}}}; start one with "
                    f"--start-server"
                )

            # In this process and not from the command line's: a driver that ends the process ends
            # the child only.
            def make() -> HiCacheStorage:
                return create_storage(
                    run.driver, _identity(run.settings.run), filled, options=options
                )

            stores = _try_out(make, _Watchdog(run, writer))
            if run.interface and not stores and not run.settings.page_bytes:
                unit = _needed_page_bytes(make)
                if unit:
                    raise Inconclusive(
                        f"it stores no page of {sum(USUAL_PAGE)} bytes, and stores one of "
                        f"{sum(page_components(USUAL_PAGE, unit))}; judge it with --page-bytes "
                        f"{unit}"
                    )
    except Inconclusive as missing:
        _give_up(writer, f"driver {run.driver!r} cannot be judged: {missing}")
    except DriverContractError as error:
        _give_up(writer, f"driver {run.driver!r} does not fit the contract: {error}")
    except HiCacheError as error:
        what = "cannot be loaded" if isinstance(error, DriverError) else "cannot be opened"
        _give_up(writer, f"driver {run.driver!r} {what}: {error}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's driver may raise anything
        _give_up(writer, f"driver {run.driver!r} cannot be opened: {type(error).__name__}: {error}")


def _check_class(driver: str) -> None:
    """Make sure of what `hicache doctor` finds out without opening anything.

    Otherwise one method that takes other arguments would be a finding of each rule.

    Raises:
        DriverError: the class cannot be loaded, or does not fit the contract.
    """
    spec = registry().get(driver)
    # Raises where there is no class to look at.
    driver_class(spec)
    found = [
        f"{finding.detail}: {finding.fix}"
        for finding in check_class(spec, named=True)
        if finding.status is Status.FAIL
    ]
    if found:
        raise DriverContractError("; ".join(found))


class _Watchdog:
    """Ends a run in which a step of the preflight hangs, so that each case would.

    From a thread of its own: a driver may do in the main thread what it does in its engine's.
    """

    def __init__(self, run: RunFile, writer: StreamWriter) -> None:
        self._run = run
        self._writer = writer
        self._opened = False

    def opened(self, capabilities: Capabilities) -> None:
        """Write down what is known of the driver, and that its first calls begin."""
        self._opened = True
        self._writer.header(_header(self._run, capabilities))
        # A driver that ends the process does it here.
        self._writer.start(PREFLIGHT, ("LC-3",), self._run.settings.levels)

    @contextlib.contextmanager
    def step(self, rule: str, name: str) -> Generator[None]:
        """Write down that `rule` is broken if the block does not end in time."""
        caller = threading.get_ident()
        # What foreign interfaces promise of it is that calls end.
        rule = "FT-3" if self._run.interface else rule
        limit = FOREIGN_SECONDS if self._run.interface else OPEN_SECONDS
        seconds = min(limit, CASE_SHARE * self._run.case_seconds)
        timer = threading.Timer(seconds, self._end, (rule, name, seconds, caller))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self, rule: str, name: str, seconds: float, caller: int) -> None:
        reason = f"{rule}: on an empty store, {name} has not come back after {seconds:.0f} s"
        stacks = stacks_in_driver() or stack_of(caller)
        if not self._opened:
            # By the declaration of its registration: the instance that could tell hangs.
            declared = registry().get(self._run.driver).capabilities
            self._writer.header(_header(self._run, declared))
        self._writer.outcome(
            CaseOutcome(
                case=PREFLIGHT,
                rules=(rule,),
                levels=self._run.settings.levels,
                outcome=Outcome.FAIL,
                reason=reason,
                detail=f"{reason}\n{stacks}"[:DETAIL_LIMIT],
                broken_rule=rule,
            )
        )
        # The process that follows the run ends this one.
        self._writer.stopped(f"the driver hangs in {name}")


def _try_out(make: Callable[[], HiCacheStorage], watchdog: _Watchdog) -> bool:
    """Open a storage, store a page, read it and close; return whether the page was stored.

    Answers are for the cases to judge; only the time counts here.

    Raises:
        Exception: constructing, registering a pool or opening has raised.
    """
    with watchdog.step("LC-1", "the constructor"):
        storage = make()
    pool = GuardedPool(pages=2)
    page = PoolTransfer(PoolName.KV, slots_of([0], pool.page_size), keys=["preflight"])
    try:
        with watchdog.step("LC-1", "register_mem_host_pool_v2()"):
            storage.register_mem_host_pool_v2(pool.host_pool, PoolName.KV)
            storage.on_host_pools_registered()
        with watchdog.step("LC-1", "open()"):
            storage.open()
        watchdog.opened(storage.capabilities)
        stored = dict[PoolName, list[bool]]()
        calls: dict[str, Callable[[], object]] = {
            "batch_set_v2()": lambda: stored.update(storage.batch_set_v2([page])),
            "batch_exists_v2()": lambda: storage.batch_exists_v2(["preflight"]),
            "batch_get_v2()": lambda: storage.batch_get_v2([page]),
        }
        for name, call in calls.items():
            # What it raises is a finding of the cases.
            with (
                contextlib.suppress(Exception, NotPromised),
                watchdog.step("FT-3", name),
            ):
                call()
        return stored.get(PoolName.KV) == [True]
    finally:
        with watchdog.step("LC-2", "close()"):
            storage.close()


def _header(run: RunFile, capabilities: Capabilities) -> Header:
    # With `{tmp}` left in: the directory differs from run to run, and reports of equal runs are
    # equal.
    shown = redacted(filled_config(run.driver, run.config, TMP))
    header = blank_header(
        run.driver, run.settings, capabilities=asdict(capabilities), options=shown
    )
    header.replay = Replay(
        run=run.settings.run,
        options=redacted(run.config),
        services=run.services,
        interface=run.interface,
        cases=run.cases,
    )
    if run.interface:
        describe_interface(header, run.config)
    return header


def _give_up(writer: StreamWriter, reason: str) -> None:
    writer.broken(reason)
    raise pytest.UsageError(reason)


def _needed_page_bytes(make: Callable[[], HiCacheStorage]) -> int:
    """Return a page length that a driver stores which has refused the usual one.

    0 where it stores none of those that are tried, or does not come back: the cases find that.
    """
    found = list[int]()

    def probe() -> None:
        found.extend(unit for unit in PROBED_UNITS if _stores_page(make, unit))

    # In a thread that may stay behind, because nothing is known about the driver yet.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return found[0] if found else 0


def _stores_page(make: Callable[[], HiCacheStorage], unit: int) -> bool:
    """Return whether a driver stores one page, of a length that is a multiple of `unit` bytes."""
    pool = GuardedPool(pages=4, components=page_components(USUAL_PAGE, unit), exact=True)
    transfer = PoolTransfer(
        PoolName.KV, slots_of([0], pool.page_size), keys=[f"preflight-{unit:064d}"]
    )
    try:
        storage = make()
        try:
            storage.register_mem_host_pool_v2(pool, PoolName.KV)
            storage.on_host_pools_registered()
            return storage.batch_set_v2([transfer])[PoolName.KV] == [True]
        finally:
            storage.close()
    except Exception:  # noqa: BLE001 - a stranger's driver may raise anything
        return False


def _identity(run: str) -> StorageIdentity:
    return StorageIdentity(
        model="conformance/preflight",
        kv_dtype="bfloat16",
        page_size=2,
        layout="page_first",
        salt=run,
    )
