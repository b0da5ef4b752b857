"""The one hook that a driver package implements, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import pluggy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.spec import Capabilities

PROJECT: Final = "hicache_storage"
ENTRY_POINT_GROUP: Final = "hicache_storage.drivers"

hookspec: Final[pluggy.HookspecMarker] = pluggy.HookspecMarker(PROJECT)
hookimpl: Final[pluggy.HookimplMarker] = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSpec:
    """Everything about a driver that can be known without importing it."""

    name: str
    """Name in `create_storage("file", ...)`."""
    target: str
    """`"package.module:Class"`: a `HiCacheStorage` subclass.

    Called as `Class(identity, config)`.
    """
    config: str
    """`"package.module:Model"`: a `DriverConfig` subclass with the driver's options."""
    capabilities: Capabilities
    """Upper bound of the capabilities.

    Those of an instance may be fewer, depending on its options.
    """
    summary: str = ""
    """One line for `hicache drivers`."""
    requires: tuple[str, ...] = ()
    """Distributions named in the error when the target cannot be imported."""
    # Left out of the hash, because a dict has none.
    trial_config: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    """Options for a throwaway store, where they have no default.

    `{tmp}` stands for an empty directory, `{unique}` for a name that no other store has, such as
    a prefix of keys, and `{port:NAME}` for the TCP port that one of `trial_services` listens on.
    """
    trial_services: tuple[tuple[str, ...], ...] = ()
    """Commands of the servers that a throwaway store needs, in the order of their start.

    `{port:NAME}` stands for a free port of 127.0.0.1, the same for the same name, and `{tmp}` for
    an empty directory that a restarted server finds as it left it.
    """
    trial_members: tuple[str, ...] = ()
    """Names of the ports of those of `trial_services` of which each keeps a part of the pages.

    Each page is whole on one of them, or on several as copies, and stays there. The conformance
    suite takes one after the other away (rule FT-8); two at least.
    """
    capacity_option: str = ""
    """The option that limits how many bytes are stored; empty where there is none.

    Its value is text such as `"64MiB"`.
    """


@hookspec
def hicache_register_drivers() -> Sequence[DriverSpec]:  # type: ignore[empty-body]
    """Return the drivers that this package offers.

    Called once for each process, when a driver is first looked for. The module that implements it
    imports nothing heavy: the strings in a `DriverSpec` are resolved when the driver is opened.
    """
