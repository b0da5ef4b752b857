"""Driver plugin that registers the foreign driver of a run, in the processes of that run alone.

No environment has it as an entry point. `register_in` puts one into the directory of a run, which
the workers of the run, and processes that they start, have on their path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.interfaces.profile import current
from hicache_storage.hookspecs import ENTRY_POINT_GROUP, DriverSpec, hookimpl
from hicache_storage.spec import Capabilities

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NAME = "hicache-conformance-run"


def register_in(directory: Path) -> None:
    """Let processes with a directory on their path find the driver of their run."""
    metadata = directory / f"{NAME.replace('-', '_')}-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nforeign = {__name__}\n")


@hookimpl
def hicache_register_drivers() -> Sequence[DriverSpec]:
    """The driver that `hicache conformance run ... --interface` is about."""
    foreign = current()
    assert foreign is not None, "only the processes of a run have this entry point"
    interface, setup = foreign.interface, foreign.setup
    return [
        DriverSpec(
            name=setup.name,
            target=f"{interface.package}.storage:{interface.storage}",
            config="hicache_conformance.interfaces.options:EngineConfig",
            capabilities=Capabilities(
                sharing=setup.sharing,
                durability=setup.durability,
                # Of a class that is not imported yet it is not known.
                clears=setup.clears or (interface.has_clear and bool(setup.target)),
                evicts=bool(setup.capacity_option),
                networked=setup.networked,
                max_key_bytes=interface.key_bytes,
            ),
            summary=setup.summary,
            trial_config=setup.options,
            trial_services=setup.services,
            capacity_option=setup.capacity_option,
        )
    ]
