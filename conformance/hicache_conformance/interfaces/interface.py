"""Foreign interfaces: their drivers, their promises, and the driver that this process's run is about.

Each has a folder: `storage.py` adapts it to the contract, `rules.toml` has the interface and what it
promises, `drivers.toml` the drivers with a name on a command line. Nothing of an engine is imported
here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from hicache_conformance.model.settings import Settings
from hicache_storage.hookspecs import ENTRY_POINT_GROUP, DriverSpec, hookimpl
from hicache_storage.spec import Capabilities, DriverConfig, Durability, Sharing

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

REGISTERED: Final = "hicache-conformance-run"
"""Distribution that no environment has: `register_in` puts its entry point into the directory of a
run, which the workers of the run, and processes that they start, have on their path."""
KEY_BYTES: Final = 64
"""Length of all interfaces' keys: SHA-256 digests in hexadecimal."""
FOLDERS: Final = {"sglang": "sglang", "vllm-tier": "vllm_tier", "lmcache-l2": "lmcache_l2"}
"""Folders of the interfaces, by their names on a command line."""
PATIENCE_SECONDS: Final = 10.0
"""How long a driver may take for what an engine waits for: SGLang's limit when it detaches its
driver, and ours where an engine has none."""


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
    not_judged: str = ""
    """Why there is nothing to judge; such a driver is refused."""

    # Of SGLang's alone, whose options are entries of `extra_config`

    zero_copy: bool = False
    """KV goes through `batch_get_v1` and `batch_set_v1`, as the engine has it listed; otherwise
    through copies. Of a dynamic class the option `interface_v1` says so, to the engine, too."""
    layouts: tuple[str, ...] = ("page_first", "layer_first", "page_first_direct")
    """Host layouts that it serves, the best first."""
    divided: tuple[str, ...] = ()
    """Of the sizes, the ones that the driver divides among its ranks; each rank gets what is
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
    ranks_of_its_own: bool = False
    """A server keeps for each rank the page length and the capacity that it was first told, so that
    a case with other pages, or a smaller store, needs ranks that no other case has."""


class PromiseEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A verdict about rules, levels or cases, and the reason that a report prints with it."""

    declared: bool
    reason: str
    rules: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    """Names of test functions, or of one parametrisation of them."""
    drivers: tuple[str, ...] = ()
    """Only these drivers; empty for all."""


class Interface(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One foreign interface, as its `rules.toml` describes it."""

    interface: str
    """With the version that was read."""
    engine: str
    """Package that the engine's own drivers are imported from."""
    storage: str
    """Class of its adapter, as `module:Class`."""
    has_clear: bool
    """Whether it has a call that empties a store."""
    visible_fields: frozenset[str]
    """Fields of the identity that a driver is told, whatever the pool."""
    entry: tuple[PromiseEntry, ...]

    def undeclared(
        self, driver: str, case: str, rules: Collection[str], levels: Collection[str]
    ) -> str:
        """Return the reason why a case is not declared; empty where it is.

        What is said about the case comes first, then about all of its levels, then about all of its
        rules.

        Raises:
            LookupError: nothing is said about one of its rules.
        """
        entries = self._about(driver)
        # The exact parametrization first: an entry about one fault of a case overrules the entry
        # about the case.
        for name in (case, case.partition("[")[0]):
            for entry in entries:
                if name in entry.cases:
                    return "" if entry.declared else entry.reason
        # A case of several levels runs if one of them is promised.
        denied = {level: e.reason for e in entries[::-1] if not e.declared for level in e.levels}
        if set(levels) <= denied.keys():
            return denied[next(iter(levels))]
        reasons = [self.rule(driver, rule) for rule in rules]
        return reasons[0] if all(reasons) else ""

    def rule(self, driver: str, rule: str) -> str:
        """Return the reason why a rule is not declared; empty where it is.

        Raises:
            LookupError: nothing is said about it.
        """
        for entry in self._about(driver):
            if rule in entry.rules:
                return "" if entry.declared else entry.reason
        raise LookupError(f"nothing is written down about whether {self.interface} promises {rule}")

    def _about(self, driver: str) -> list[PromiseEntry]:
        """Return the entries about a driver, those about it alone before those about all."""
        entries = [entry for entry in self.entry if not entry.drivers or driver in entry.drivers]
        # Stable, so that within each kind the order of the file decides.
        return sorted(entries, key=lambda entry: not entry.drivers)


@dataclass(frozen=True, slots=True)
class InterfaceProfile:
    """The driver under test, and the limits of its interface that cases have to respect."""

    interface: Interface | None = None
    """None for HiCacheStorage v2 itself, which has no limits."""
    setup: Setup = field(default_factory=Setup)

    @property
    def is_native(self) -> bool:
        """Return whether it is a driver of the contract's own.

        Of others, `BLOCK_GROUPS` cannot be asked for, an answer of exists has no verdict of each
        pool, and no call names a key twice.
        """
        return self.interface is None

    @property
    def patience_seconds(self) -> float | None:
        """How long a call may take on a store that hangs; None for the storage's own deadline."""
        return None if self.is_native else PATIENCE_SECONDS + 1

    def distinguishes(self, change: Mapping[str, object]) -> bool:
        """Return whether a driver can know of this difference between two identities."""
        return self.interface is None or set(change) <= self.interface.visible_fields


@cache
def interface_of(name: str) -> Interface:
    """Return the interface of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in FOLDERS:
        raise ValueError(f"unknown interface {name!r}; interfaces are {', '.join(FOLDERS)}")
    return msgspec.toml.decode(_file(name, "rules.toml"), type=Interface)


@cache
def known(name: str) -> dict[str, Setup]:
    """Return the drivers of an interface that have a name on a command line."""
    found = msgspec.toml.decode(_file(name, "drivers.toml"), type=dict[str, Setup])
    # Programs of this environment need not be on the path.
    programs = str(Path(sys.executable).parent)
    return {
        driver: msgspec.structs.replace(
            setup,
            name=driver,
            services=tuple(
                tuple(word.replace("{bin}", programs) for word in command)
                for command in setup.services
            ),
        )
        for driver, setup in found.items()
    }


def all_known() -> dict[str, Setup]:
    """Return the drivers of all interfaces that have a name on a command line."""
    return {driver: setup for name in FOLDERS for driver, setup in known(name).items()}


def _file(name: str, file: str) -> bytes:
    return files("hicache_conformance.interfaces").joinpath(FOLDERS[name], file).read_bytes()


def foreign_driver(name: str, driver: str, config: Mapping[str, str]) -> InterfaceProfile:
    """Return the driver that a command line names, and its interface.

    Raises:
        ValueError: there is no such interface, it has no such driver and the name is not of the form
            `module:Class`, or there is nothing to judge.
    """
    interface, setup = interface_of(name), known(name).get(driver)
    if setup is None:
        module, colon, class_name = driver.partition(":")
        if not (module and colon and class_name.isidentifier()):
            raise ValueError(
                f"{driver!r} is neither MODULE:CLASS nor one of {', '.join(known(name))}"
            )
        setup = Setup(name=driver, target=driver)
    if setup.not_judged:
        raise ValueError(f"{driver}: {setup.not_judged}")
    odd = [option for option in config if not option.isidentifier()]
    if odd:
        raise ValueError(f"-c {odd[0]!r}: the name of an option has to be an identifier")
    return InterfaceProfile(interface, setup)


@cache
def interface_profile() -> InterfaceProfile:
    """Return the driver that this process's run is about, and its interface."""
    run = Settings.of_environment()
    if run is None or not run.interface:
        return InterfaceProfile()
    return foreign_driver(run.interface, run.driver, run.config)


# The driver of a run, registered in the processes of that run alone
# ------------------------------------------------------------------------------------------------


def register_in(directory: Path) -> None:
    """Let processes with a directory on their path find the driver of their run."""
    metadata = directory / f"{REGISTERED.replace('-', '_')}-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {REGISTERED}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nforeign = {__name__}\n")


@hookimpl
def hicache_register_drivers() -> Sequence[DriverSpec]:
    """The driver that `hicache conformance run ... --interface` is about."""
    profile = interface_profile()
    interface, setup = profile.interface, profile.setup
    assert interface is not None, "only the processes of a run have this entry point"
    return [
        DriverSpec(
            name=setup.name,
            target=interface.storage,
            config=f"{__name__}:EngineConfig",
            # Of a class that is not imported yet it is not known whether it clears.
            capabilities=capabilities(
                setup,
                clears=setup.clears or (interface.has_clear and bool(setup.target)),
                evicts=bool(setup.capacity_option),
            ),
            summary=setup.summary,
            trial_config=setup.options,
            trial_services=setup.services,
            capacity_option=setup.capacity_option,
        )
    ]


def capabilities(setup: Setup, *, clears: bool, evicts: bool) -> Capabilities:
    """Capabilities of a foreign driver."""
    return Capabilities(
        sharing=setup.sharing,
        durability=setup.durability,
        clears=clears,
        evicts=evicts,
        networked=setup.networked,
        max_key_bytes=KEY_BYTES,
    )


def __getattr__(name: str) -> object:
    if name == "EngineConfig":
        return _engine_config()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _engine_config() -> type[DriverConfig]:
    """A model of options with a field for each that this run may set.

    What else stands on a command line is a mistake.
    """
    run, setup = Settings.of_environment(), interface_profile().setup
    names = {*setup.options, *(run.config if run else ())}
    if setup.capacity_option:
        names.add(setup.capacity_option)
    fields: list[Any] = [(name, Any, None) for name in sorted(names)]
    model = msgspec.defstruct(
        "EngineConfig", fields, bases=(DriverConfig,), module=__name__, frozen=True, kw_only=True
    )
    return cast("type[DriverConfig]", model)
