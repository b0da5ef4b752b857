"""Set-up of a foreign driver.

Its constructor arguments, and the servers and files that it needs.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from hicache_conformance.model.settings import RunFile
from hicache_storage.spec import Durability, Sharing

if TYPE_CHECKING:
    from collections.abc import Mapping

INTERFACES: Final = ("sglang",)
"""Interfaces that there is an adapter for."""
KEY_BYTES: Final = 64
"""SGLang's keys are SHA-256 digests in hexadecimal."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One driver, as `drivers.toml` describes it or as a command line names it."""

    name: str = ""
    """As it is written on a command line."""
    summary: str = ""
    backend: str = ""
    """Name in the engine's own factory; empty for a class that it loads dynamically."""
    target: str = ""
    """`module:Class` of a dynamically loaded one."""
    zero_copy: bool = False
    """KV goes through `batch_get_v1` and `batch_set_v1`, as the engine has it listed; otherwise
    through copies."""
    layouts: tuple[str, ...] = ("page_first", "layer_first", "page_first_direct")
    """Host layouts that it serves, the best first."""
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
    """Entries of its `extra_config`, where the command line gives none."""
    sizes: tuple[str, ...] = ()
    """Options that are numbers of bytes, and may be written as `64MiB`."""
    divided: tuple[str, ...] = ()
    """Of these sizes, the ones that the driver divides among its ranks; each rank gets what is
    written."""
    directories: tuple[str, ...] = ()
    """Options that name a directory which has to exist: the engine's first rank makes it."""
    variables: dict[str, str] = {}
    """Options that it reads from environment variables and not from `extra_config`, and the names of
    these variables."""
    config_variable: str = ""
    """Environment variable that names its configuration file, where it reads one."""
    config_keys: tuple[str, ...] = ()
    """Options that belong into that file and not into `extra_config`."""
    services: tuple[tuple[str, ...], ...] = ()
    """Servers that it needs, as `DriverSpec.trial_services` has them."""
    capacity_option: str = ""
    ranks_of_its_own: bool = False
    """A server keeps for each rank the page length and the capacity that it was first told, so that
    a case with other pages, or a smaller store, needs ranks that no other case has."""
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
    """Script that shows what the matrix says about it without the suite; its arguments are rules."""
    not_judged: str = ""
    """Why there is nothing to judge; such a driver is refused."""


@cache
def known() -> dict[str, Setup]:
    """The engine's own drivers, by the names that stand for them on a command line."""
    text = files("hicache_conformance.interfaces.sglang").joinpath("drivers.toml").read_bytes()
    listed = msgspec.toml.decode(text, type=dict[str, Setup])
    return {
        name: msgspec.structs.replace(setup, name=name, services=_here(setup.services))
        for name, setup in listed.items()
    }


def _here(services: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """Commands with `{bin}` filled in.

    It stands for programs of this environment, which need not be on the path.
    """
    programs = str(Path(sys.executable).parent)
    return tuple(tuple(word.replace("{bin}", programs) for word in command) for command in services)


def setup_of(driver: str, config: Mapping[str, str]) -> Setup:
    """The setup of a driver that a command line names.

    Raises:
        ValueError: it is neither known nor of the form `module:Class`, or there is nothing to
            judge.
    """
    setup = known().get(driver)
    if setup is None:
        module, colon, name = driver.partition(":")
        if not (module and colon and name.isidentifier()):
            raise ValueError(f"{driver!r} is neither MODULE:CLASS nor one of {', '.join(known())}")
        # The option by which the engine, too, is told that a dynamic class takes addresses.
        zero_copy = config.get("interface_v1", "") not in ("", "0", "false")
        setup = Setup(name=driver, target=driver, zero_copy=zero_copy)
    if setup.not_judged:
        raise ValueError(f"{driver}: {setup.not_judged}")
    odd = [name for name in config if not name.isidentifier()]
    if odd:
        raise ValueError(f"-c {odd[0]!r}: a key of extra_config has to be an identifier")
    return setup


@cache
def current() -> Setup | None:
    """The setup of the driver that this process's run is about.

    None where it is a driver of the contract's own.
    """
    run = RunFile.of_environment()
    return setup_of(run.driver, run.config) if run is not None and run.interface else None
