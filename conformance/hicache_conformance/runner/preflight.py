"""Preflight of a command-line run: checks that the driver can be loaded, constructed and opened.

A foreign driver must also store pages of the run's length, or of none.
"""

from __future__ import annotations

import tempfile
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import pytest

from hicache_conformance.fixtures.context import NO_LAYERS
from hicache_conformance.fixtures.environment import commands_of, environment_of
from hicache_conformance.fixtures.open_context import filled_config
from hicache_conformance.harness.pools import GuardedPool, page_components, slots_of
from hicache_conformance.interfaces.profile import describe_interface
from hicache_conformance.model.outcomes import Replay
from hicache_conformance.model.settings import port_names, unique_name
from hicache_conformance.model.violation import Inconclusive
from hicache_conformance.report.header import blank_header
from hicache_storage.plugins import create_storage
from hicache_storage.spec import (
    DriverError,
    HiCacheError,
    PoolName,
    PoolTransfer,
    StorageIdentity,
)
from hicache_storage.tools.options import TMP, redacted

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_conformance.fixtures.open_context import DriverDeclaration
    from hicache_conformance.model.outcomes import StreamWriter
    from hicache_conformance.model.settings import RunFile
    from hicache_storage.spec import HiCacheStorage

USUAL_PAGE: Final = (96, 160)
"""Bytes of the components of the cases' usual page."""
PROBED_UNITS: Final = (8 << 10, 64 << 10, 1 << 20)
"""Page lengths, in bytes, that a driver is tried with when it has refused the usual one."""
PROBE_SECONDS: Final = 20.0


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
        with tempfile.TemporaryDirectory(prefix="hicache-preflight-") as directory:
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
            storage = create_storage(run.driver, _identity(), filled, options=options)
            try:
                storage.open()
            finally:
                storage.close()
            if run.interface and not run.settings.page_bytes:
                unit = _needed_page_bytes(
                    lambda: create_storage(
                        run.driver, _identity(run.settings.run), filled, options=options
                    )
                )
                if unit:
                    raise Inconclusive(
                        f"it stores no page of {sum(USUAL_PAGE)} bytes, and stores one of "
                        f"{sum(page_components(USUAL_PAGE, unit))}; judge it with --page-bytes "
                        f"{unit}"
                    )
        # With `{tmp}` left in: the directory differs from run to run, and reports of equal runs are
        # equal.
        shown = redacted(filled_config(run.driver, run.config, TMP))
        header = blank_header(
            run.driver, run.settings, capabilities=asdict(storage.capabilities), options=shown
        )
        header.replay = Replay(
            run=run.settings.run,
            options=redacted(run.config),
            services=run.services,
            interface=run.interface,
        )
        if run.interface:
            describe_interface(header, run.interface, run.config)
        writer.header(header)
    except Inconclusive as missing:
        _give_up(writer, f"driver {run.driver!r} cannot be judged: {missing}")
    except HiCacheError as error:
        what = "cannot be loaded" if isinstance(error, DriverError) else "cannot be opened"
        _give_up(writer, f"driver {run.driver!r} {what}: {error}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's driver may raise anything
        _give_up(writer, f"driver {run.driver!r} cannot be opened: {type(error).__name__}: {error}")


def _give_up(writer: StreamWriter, reason: str) -> None:
    writer.broken(reason)
    raise pytest.UsageError(reason)


def _needed_page_bytes(make: Callable[[], HiCacheStorage]) -> int:
    """Return the page length that a driver needs which refuses the usual one; 0 where it does not.

    0 also where it stores none of those that are tried, or does not come back: the cases find that.
    """
    found = list[int]()

    def probe() -> None:
        if not _stores_page(make, 0):
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


def _identity(salt: str = "") -> StorageIdentity:
    return StorageIdentity(
        model="conformance/preflight",
        kv_dtype="bfloat16",
        page_size=2,
        layout="page_first",
        salt=salt,
    )
