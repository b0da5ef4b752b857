"""Preflight of a command-line run: checks that the driver can be loaded, constructed and opened."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest

from hicache_conformance.fixtures.context import NO_LAYERS
from hicache_conformance.fixtures.environment import commands_of, environment_of
from hicache_conformance.fixtures.open_context import filled_config
from hicache_conformance.interfaces.profile import describe_interface
from hicache_conformance.model.outcomes import Replay
from hicache_conformance.model.settings import port_names, unique_name
from hicache_conformance.model.violation import Inconclusive
from hicache_conformance.report.header import blank_header
from hicache_storage.plugins import create_storage
from hicache_storage.spec import DriverError, HiCacheError, StorageIdentity
from hicache_storage.tools.options import TMP, redacted

if TYPE_CHECKING:
    from hicache_conformance.fixtures.open_context import DriverDeclaration
    from hicache_conformance.model.outcomes import StreamWriter
    from hicache_conformance.model.settings import RunFile


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
            cases=run.cases,
        )
        if run.interface:
            describe_interface(header, run.interface, run.config)
        writer.header(header)
    except Inconclusive as missing:
        _give_up(writer, f"driver {run.driver!r} cannot be opened: {missing}")
    except HiCacheError as error:
        what = "cannot be loaded" if isinstance(error, DriverError) else "cannot be opened"
        _give_up(writer, f"driver {run.driver!r} {what}: {error}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's driver may raise anything
        _give_up(writer, f"driver {run.driver!r} cannot be opened: {type(error).__name__}: {error}")


def _give_up(writer: StreamWriter, reason: str) -> None:
    writer.broken(reason)
    raise pytest.UsageError(reason)


def _identity() -> StorageIdentity:
    return StorageIdentity(
        model="conformance/preflight", kv_dtype="bfloat16", page_size=2, layout="page_first"
    )
