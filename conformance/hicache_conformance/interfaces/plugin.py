"""Driver plugin that registers the foreign driver of a run, in the processes of that run alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.interfaces.profile import current
from hicache_storage.hookspecs import DriverSpec, hookimpl
from hicache_storage.spec import Capabilities

if TYPE_CHECKING:
    from collections.abc import Sequence


@hookimpl
def hicache_register_drivers() -> Sequence[DriverSpec]:
    """The driver that `hicache conformance run ... --interface` is about."""
    foreign = current()
    # In every other process of an environment there is no run file, and no foreign driver.
    if foreign is None:
        return []
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
