"""The foreign interfaces, and the one that this process's run is about."""

from __future__ import annotations

import importlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from typing import TYPE_CHECKING, Any, Final

from hicache_conformance.harness.driver_files import driver_files
from hicache_conformance.interfaces.interface import Interface, InterfaceProfile, Setup
from hicache_conformance.model.rules import rules
from hicache_conformance.model.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_conformance.model.outcomes import Header

FOLDERS: Final = {"sglang": "sglang", "vllm-tier": "vllm_tier", "lmcache-l2": "lmcache_l2"}
"""Folders of the interfaces, by their names on a command line."""


def interface_of(name: str) -> Interface:
    """Return the interface of a name. Only then is anything of it imported.

    Raises:
        ValueError: there is none.
    """
    if name not in FOLDERS:
        raise ValueError(f"unknown interface {name!r}; interfaces are {', '.join(FOLDERS)}")
    module: Any = importlib.import_module(f"{__package__}.{FOLDERS[name]}.interface")
    found: Interface = module.INTERFACE
    return found


@dataclass(frozen=True, slots=True)
class ForeignDriver:
    """A foreign driver, and the interface that it has."""

    interface: Interface
    setup: Setup


def known() -> dict[str, Setup]:
    """Return the drivers of all interfaces that have a name on a command line."""
    return {
        name: setup
        for interface in map(interface_of, FOLDERS)
        for name, setup in interface.known().items()
    }


def foreign_driver(interface: str, driver: str, config: Mapping[str, str]) -> ForeignDriver:
    """Return the driver that a command line names.

    Raises:
        ValueError: there is no such interface, or no such driver of it.
    """
    found = interface_of(interface)
    return ForeignDriver(found, found.setup_of(driver, config))


@cache
def current() -> ForeignDriver | None:
    """Return the driver that this process's run is about.

    None where it is a driver of the contract's own.
    """
    run = Settings.of_environment()
    if run is None or not run.interface:
        return None
    return foreign_driver(run.interface, run.driver, run.config)


def describe_interface(header: Header) -> None:
    """Write into a header what the interface of a foreign driver is and does not promise."""
    foreign = current()
    assert foreign is not None
    promises = foreign.interface.promises()
    header.interface = promises.interface
    header.distribution = foreign_distributions(foreign)
    header.files = driver_files([foreign.setup.target or foreign.interface.engine])
    for rule in rules():
        with suppress(LookupError):
            reason = promises.rule(header.driver, rule)
            if reason:
                header.not_promised[rule] = reason


def foreign_distributions(foreign: ForeignDriver) -> str:
    """Return names and versions of the distributions that a foreign driver comes from."""
    target = foreign.setup.target or foreign.interface.engine
    package = target.partition(":")[0].partition(".")[0]
    owners = packages_distributions().get(package, [])[:1]
    return ", ".join(
        f"{name} {version(name)}" for name in dict.fromkeys((*owners, *foreign.setup.clients))
    )


@cache
def interface_profile() -> InterfaceProfile:
    """Return the interface profile of this process's run."""
    foreign = current()
    return InterfaceProfile() if foreign is None else foreign.interface.profile_of(foreign.setup)
