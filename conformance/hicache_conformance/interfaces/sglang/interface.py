"""SGLang's storage interface: setup of its drivers, and what cases have to respect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from hicache_conformance.interfaces.interface import Interface, InterfaceProfile, Setup

if TYPE_CHECKING:
    from collections.abc import Mapping

PATIENCE_SECONDS: Final = 11.0
"""SGLang gives a call 10 s when it detaches its driver; and a second."""
FIELDS: Final = frozenset(
    {"model", "tp_rank", "tp_size", "pp_rank", "pp_size", "cp_rank", "cp_size"}
)
"""What `HiCacheStorageConfig` tells a driver. Element type and layout it has from each pool, and
Mamba states have their own."""


class SGLangSetup(Setup, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One driver with SGLang's interface; its options are entries of `extra_config`."""

    zero_copy: bool = False
    """KV goes through `batch_get_v1` and `batch_set_v1`, as the engine has it listed; otherwise
    through copies."""
    layouts: tuple[str, ...] = ("page_first", "layer_first", "page_first_direct")
    """Host layouts that it serves, the best first."""
    divided: tuple[str, ...] = ()
    """Of the sizes, the ones that the driver divides among its ranks; each rank gets what is
    written."""
    directories: tuple[str, ...] = ()
    """Options that name a directory which has to exist: the engine's first rank makes it."""
    variables: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Options that it reads from environment variables and not from `extra_config`, and the names of
    these variables."""
    config_variable: str = ""
    """Environment variable that names its configuration file, where it reads one."""
    config_keys: tuple[str, ...] = ()
    """Options that belong into that file and not into `extra_config`."""
    ranks_of_its_own: bool = False
    """A server keeps for each rank the page length and the capacity that it was first told, so that
    a case with other pages, or a smaller store, needs ranks that no other case has."""


@dataclass(frozen=True, kw_only=True)
class _SGLang(Interface):
    def named(self, target: str, config: Mapping[str, str]) -> Setup:
        # The option by which the engine, too, is told that a dynamic class takes addresses.
        zero_copy = config.get("interface_v1", "") not in ("", "0", "false")
        return SGLangSetup(name=target, target=target, zero_copy=zero_copy)


INTERFACE: Final = _SGLang(
    name="sglang",
    package="hicache_conformance.interfaces.sglang",
    engine="sglang",
    storage="EngineStorage",
    # SHA-256 digests in hexadecimal.
    key_bytes=64,
    setup_type=SGLangSetup,
    profile=InterfaceProfile(
        block_groups=False,
        pool_verdicts=False,
        repeated_keys=False,
        patience_seconds=PATIENCE_SECONDS,
        visible_fields=FIELDS,
    ),
)
