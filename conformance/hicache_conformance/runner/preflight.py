"""Preflight of a command-line run: checks that the driver can be loaded, constructed and opened."""

from __future__ import annotations

import contextlib
import faulthandler
import tempfile
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Final

import msgspec
import pytest

from hicache_conformance.fixtures.context import IDENTITY, NO_LAYERS
from hicache_conformance.fixtures.environment import DriverSetup, environment_of
from hicache_conformance.harness.pools import GuardedPool, slots_of
from hicache_conformance.model.case import Inconclusive, NotPromised, cases_of
from hicache_conformance.model.outcomes import PREFLIGHT, CaseOutcome, Header, Outcome, Replay
from hicache_conformance.model.pytest_keys import MESSAGE, STARTING_SECONDS
from hicache_conformance.model.rules import all_needs, undeclared
from hicache_conformance.model.settings import Settings, port_names, unique_name
from hicache_conformance.report.header import blank_header, describe_interface
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
    from collections.abc import Callable, Generator

    from hicache_conformance.fixtures.target import DriverTarget

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
    header = _header(settings, declared)
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


def _header(settings: Settings, capabilities: Capabilities) -> Header:
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
