"""Driver plugin that registers the foreign driver of a run, in the processes of that run alone.

No environment has it as an entry point. `register_in` puts one into the directory of a run, which
the workers of the run, and processes that they start, have on their path.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from hicache_conformance.interfaces.interface import Setup, interface_profile
from hicache_conformance.model.settings import Settings
from hicache_storage.hookspecs import ENTRY_POINT_GROUP, DriverSpec, hookimpl
from hicache_storage.spec import Capabilities, DriverConfig

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


NAME: Final = "hicache-conformance-run"
KEY_BYTES: Final = 64
"""Length of all interfaces' keys: SHA-256 digests in hexadecimal."""


def register_in(directory: Path) -> None:
    """Let processes with a directory on their path find the driver of their run."""
    metadata = directory / f"{NAME.replace('-', '_')}-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
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
