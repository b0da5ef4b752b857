"""A foreign interface: its adapter, its promises and the drivers that have a name.

Each has a folder with `storage.py` (the adapter), `rules.toml` (the promises), `drivers.toml` (the
drivers) and `interface.py`, which puts them together and imports nothing of the engine.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hicache_conformance.interfaces.promises import Promises
from hicache_storage.spec import Durability, Sharing

if TYPE_CHECKING:
    from collections.abc import Mapping

PATIENCE_SECONDS: Final = 10.0
"""How long a driver may take for what an engine waits for without a limit."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One driver, as `drivers.toml` describes it or as a command line names it."""

    name: str = ""
    """As it is written on a command line."""
    summary: str = ""
    backend: str = ""
    """Name in the engine's own factory; empty for a class that it loads dynamically."""
    target: str = ""
    """`module:Class` of a dynamically loaded one."""
    sharing: Sharing = Sharing.NONE
    durability: Durability = Durability.NONE
    clears: bool = False
    clears_at_once: bool = True
    """False where a page that was just looked up outlives a clear for as long as its lease
    lasts."""
    networked: bool = False
    keeps_bytes: bool = True
    """False for a simulator, which answers as a store would and delivers nothing."""
    options: dict[str, str] = {}
    """Options of the driver, where the command line gives none."""
    sizes: tuple[str, ...] = ()
    """Options that are numbers of bytes, and may be written as `64MiB`."""
    services: tuple[tuple[str, ...], ...] = ()
    """Servers that it needs, as `DriverSpec.trial_services` has them."""
    capacity_option: str = ""
    max_lingering: int = 0
    """Closed storages that a process keeps before the run goes on in another, of a driver whose end
    is left to the end of the process, as the engine leaves it; 0 for one that is closed at once."""
    joining_seconds: float = 0.0
    """How long the nodes of a cluster may need to learn of one more. An engine loads its model
    meanwhile."""
    forgetting_seconds: float = 0.0
    """How long they may need to learn that processes have ended; pages are lost meanwhile, which no
    later case shall meet."""
    page_bytes: int = 0
    """Bytes that its pages are multiples of, where the command line says nothing; 0 for pages of any
    length."""
    clients: tuple[str, ...] = ()
    """Distributions whose code it calls, and whose versions belong to what is judged."""
    reproductions: str = ""
    """Script that shows what the matrix says about it without the suite, with arguments of its own; rules
    may follow."""
    not_judged: str = ""
    """Why there is nothing to judge; such a driver is refused."""


@dataclass(frozen=True, slots=True)
class InterfaceProfile:
    """Limits of an interface that cases have to respect; HiCacheStorage v2 has none."""

    promises: Promises | None = None
    block_groups: bool = True
    """Whether the policy `BLOCK_GROUPS` can be asked for."""
    pool_verdicts: bool = True
    """Whether each pool's own verdict is part of an answer of exists."""
    keeps_bytes: bool = True
    """False for a simulator, whose pages cannot be read."""
    clears_at_once: bool = True
    """Whether a page that was just looked up is gone when a clear has returned."""
    repeated_keys: bool = True
    """Whether a call may name a key twice."""
    forgetting_seconds: float = 0.0
    """How long a store may need to learn that a process has ended, before another case begins."""
    patience_seconds: float | None = None
    """How long a call may take on a store that hangs; None for the storage's own deadline and a
    second."""
    visible_fields: frozenset[str] | None = None
    """Fields of the identity that the driver is told, whatever the pool; None for all."""

    def distinguishes(self, change: Mapping[str, object]) -> bool:
        """Return whether a driver can know of this difference between two identities."""
        return self.visible_fields is None or set(change) <= self.visible_fields


@dataclass(frozen=True, kw_only=True)
class Interface:
    """One foreign interface. A subclass says how its drivers are set up where `Setup` is too little."""

    name: str
    """As `--interface` has it."""
    package: str
    """Package of its folder."""
    engine: str
    """Package that the engine's own drivers are imported from."""
    storage: str
    """Class of its adapter, in `storage.py`."""
    key_bytes: int
    """Length of its keys, as text."""
    has_clear: bool = True
    """Whether it has a call that empties a store."""
    profile: InterfaceProfile
    """What cases have to respect, of every driver."""
    setup_type: type[Setup] = field(default=Setup)

    def promises(self) -> Promises:
        """Return what it promises."""
        return _promises(self.package)

    def known(self) -> dict[str, Setup]:
        """Return the drivers with a name on a command line."""
        return _known(self.package, self.setup_type)

    def named(self, target: str, config: Mapping[str, str]) -> Setup:
        """Return the setup of a class that a command line names as `module:Class`."""
        return self.setup_type(name=target, target=target)

    def setup_of(self, driver: str, config: Mapping[str, str]) -> Setup:
        """Return the setup of a driver that a command line names.

        Raises:
            ValueError: it is neither known nor of the form `module:Class`, or there is nothing to
                judge.
        """
        setup = self.known().get(driver)
        if setup is None:
            module, colon, name = driver.partition(":")
            if not (module and colon and name.isidentifier()):
                raise ValueError(
                    f"{driver!r} is neither MODULE:CLASS nor one of {', '.join(self.known())}"
                )
            setup = self.named(driver, config)
        if setup.not_judged:
            raise ValueError(f"{driver}: {setup.not_judged}")
        odd = [name for name in config if not name.isidentifier()]
        if odd:
            raise ValueError(f"-c {odd[0]!r}: the name of an option has to be an identifier")
        return setup

    def profile_of(self, setup: Setup) -> InterfaceProfile:
        """Return what cases have to respect of a driver."""
        return replace(
            self.profile,
            promises=self.promises(),
            keeps_bytes=setup.keeps_bytes,
            clears_at_once=setup.clears_at_once,
            forgetting_seconds=setup.forgetting_seconds,
        )


@cache
def _promises(package: str) -> Promises:
    text = files(package).joinpath("rules.toml").read_bytes()
    return msgspec.toml.decode(text, type=Promises)


@cache
def _known(package: str, setup_type: type[Setup]) -> dict[str, Setup]:
    text = files(package).joinpath("drivers.toml").read_bytes()
    listed: dict[str, Any] = msgspec.toml.decode(text)
    setups = {name: msgspec.convert(each, setup_type) for name, each in listed.items()}
    return {
        name: msgspec.structs.replace(setup, name=name, services=_here(setup.services))
        for name, setup in setups.items()
    }


def _here(services: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """Commands with `{bin}` filled in.

    It stands for programs of this environment, which need not be on the path.
    """
    programs = str(Path(sys.executable).parent)
    return tuple(tuple(word.replace("{bin}", programs) for word in command) for command in services)
