"""Configuration and identity, derived from SGLang's configuration; needs no SGLang."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from hicache_storage.engines.bridge_config import BridgeConfig, parse_options
from hicache_storage.spec import ConfigError, InvalidPoolError, StorageIdentity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig as EngineConfig

ENGINE_KEYS = frozenset(
    {
        "backend_name",
        "class_name",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)
"""Keys of `extra_config` that SGLang 0.5.23 reads itself.

It removes most of them before it passes the others on.
"""

OPAQUE_DTYPES = frozenset({"uint8", "int8"})
"""Storage dtypes that do not tell the logical one.

SGLang keeps every fp8 and packed KV as uint8.
"""

HEAD_POOLS = frozenset({"draft", "draft_swa", "swa"})
"""Side pools that hold KV heads, as the KV pool does: stored in shards where that is."""

RANK_POOLS = frozenset({"auxiliary_swa", "draft_indexer", "indexer", "mamba"})
"""Side pools that stay bound to the rank and the TP size beside KV in shards."""

NO_OVERRIDES = ("", "{}", "null")
"""`--json-model-override-args` that override nothing."""

NO_WEIGHT_VERSION = ("", "default")
"""Values of `--weight-version` that stand for none."""


class SGLangBridgeConfig(BridgeConfig, frozen=True):
    """The bridge's own keys in SGLang's `--hicache-storage-backend-extra-config`."""

    metrics_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="Base port of the exporter for Prometheus; each rank listens on this port "
            "plus its number (tp_rank, with TP alone). 0 disables it.",
        ),
    ] = 0
    metrics_host: Annotated[
        str, Meta(description="Address on which the exporter listens. It asks for no token.")
    ] = "127.0.0.1"


def bridge_config(extra_config: Mapping[str, object] | None) -> SGLangBridgeConfig:
    """Parse the bridge's configuration out of SGLang's `extra_config`.

    Raises:
        ConfigError: `interface_v1` is missing, or a key is unknown, missing or has a bad value; the
            message names it.
    """
    options = extra_config or {}
    if not options.get("interface_v1"):
        raise ConfigError(
            'hicache bridge: set "interface_v1": 1 in the storage backend\'s extra config; without '
            "it SGLang moves KV through its oldest interface (batch_get and batch_set of copies), "
            "which the bridge does not serve"
        )
    return parse_options(
        SGLangBridgeConfig,
        options,
        where="the storage backend's extra config",
        engine_keys=ENGINE_KEYS,
    )


def check_engine(engine: EngineConfig) -> None:
    """Check that the keys of a deployment name its pages unambiguously.

    Raises:
        ConfigError: pages are to be shared between different TP sizes where a rank holds a part of
            a page's tokens, or the model has no name.
    """
    if engine.tp_lcm_size and engine.dcp_size > 1 and not engine.is_mla_model:
        raise ConfigError(
            f"hicache bridge: tp_lcm_size={engine.tp_lcm_size} asks to share pages between "
            f"different TP sizes, and with decode context parallelism (size {engine.dcp_size}) a "
            "rank holds a part of a page's tokens; remove it from the extra config"
        )
    if not engine.model_name:
        raise ConfigError(
            "hicache bridge: SGLang gave no model name, and pages of two models must not meet; set "
            "one"
        )


def storage_identity(
    engine: EngineConfig,
    config: SGLangBridgeConfig,
    anchor: object,
    *,
    engine_kv_dtype: str = "",
    weight_version: str = "",
    variant: Mapping[str, str] | None = None,
    kv_heads: int = 0,
) -> StorageIdentity:
    """Derive the identity of a rank's pages.

    A DCP rank holds every `dcp_size`-th token of a page, which is what a CP rank is: DCP multiplies
    the CP size, and the TP groups that it cuts are the replicas. So the writer of a replicated pool
    is SGLang's `is_storage_writer`.

    With `tp_lcm_size`, KV is stored in as many shards, or in the largest number of shards that
    divides it and the number of KV heads: a rank holds whole heads.

    Args:
        engine: SGLang's `HiCacheStorageConfig`.
        config: the bridge's configuration.
        anchor: the KV host pool, or the logical anchor in its place.
        engine_kv_dtype: the engine's `--kv-cache-dtype`, empty if unknown.
        weight_version: the engine's `--weight-version`, or that of the last update of its weights;
            empty if unknown.
        variant: the result of `model_variant`.
        kv_heads: KV heads of the model, 0 if unknown; decides only with `tp_lcm_size`.

    Raises:
        ConfigError: `kv_dtype` contradicts the pool.
        InvalidIdentityError: the KV heads of the ranks cannot be stored in such shards.
        InvalidPoolError: the logical KV dtype is not known.
    """
    # SGLang's own end_layer is exclusive in some pools and inclusive in others.
    layer_start, layers = _number(anchor, "start_layer"), _number(anchor, "layer_num")
    identity = StorageIdentity(
        model=engine.model_name or "",
        revision=_revision(config.revision, weight_version, variant or {}),
        kv_dtype=logical_dtype(anchor, config.kv_dtype, engine_kv_dtype),
        page_size=_number(anchor, "logical_page_size") or _number(anchor, "page_size"),
        layout=str(getattr(anchor, "layout", "")),
        layer_start=layer_start,
        layer_end=layer_start + layers if layers else 0,
        tp_rank=engine.tp_rank // engine.dcp_size,
        tp_size=engine.tp_size // engine.dcp_size,
        pp_rank=engine.pp_rank,
        pp_size=engine.pp_size,
        cp_rank=engine.attn_cp_rank * engine.dcp_size + engine.dcp_rank,
        cp_size=engine.attn_cp_size * engine.dcp_size,
        dp_rank=engine.dp_rank,
        # SGLang does not say how many there are; DP replicas share their pages, so the number
        # decides nothing.
        dp_size=engine.dp_rank + 1,
        kv_replicated=engine.is_mla_model,
        tenant=config.tenant,
        salt=config.salt,
    )
    if not engine.tp_lcm_size or engine.is_mla_model:
        return identity
    return _in_shards(identity, engine.tp_lcm_size, kv_heads)


def _in_shards(identity: StorageIdentity, tp_lcm_size: int, kv_heads: int) -> StorageIdentity:
    size, shards = identity.tp_size, math.gcd(tp_lcm_size, kv_heads)
    bound = identity.tp_sharded_pools | RANK_POOLS
    if size <= shards:
        return replace(identity, store_tp_size=shards, tp_sharded_pools=bound)
    # KV heads are replicated over ranks, each of which SGLang gives one. Those of side pools may be
    # more, and not replicated.
    first = identity.tp_rank * kv_heads // size
    return replace(
        identity,
        store_tp_size=shards,
        tp_sharded_pools=bound | HEAD_POOLS,
        head_start=first,
        head_end=first + max(1, kv_heads // size),
    )


def _revision(declared: str, weight_version: str, variant: Mapping[str, str]) -> str:
    # A JSON list, because each part may contain any separator. Without parts that are empty, so
    # that the namespaces of engines without them stay the same.
    version = "" if weight_version in NO_WEIGHT_VERSION else weight_version
    if variant:
        return json.dumps([declared, version, dict(variant)], sort_keys=True)
    return json.dumps([declared, version]) if version else declared


def model_variant(model: object) -> dict[str, str]:
    """Return the engine's options that change the KV of a prompt, beside the model's name.

    `--json-model-override-args` changes its configuration (rope scaling),
    `--quantization-param-path` scales its fp8 KV.

    Args:
        model: the namespace of SGLang's options about the model.

    Raises:
        ConfigError: the file of scales cannot be read.
    """
    variant = dict[str, str]()
    overrides: object = getattr(model, "json_model_override_args", None)
    if isinstance(overrides, str) and (text := _canonical(overrides)) not in NO_OVERRIDES:
        variant["json_model_override_args"] = text
    scales: object = getattr(model, "quantization_param_path", None)
    if isinstance(scales, str) and scales:
        try:
            # A digest of the content, not the path: nodes may keep the file elsewhere, or replace
            # it in place.
            digest = hashlib.blake2b(Path(scales).read_bytes(), digest_size=16).hexdigest()
        except OSError as error:
            raise ConfigError(
                "hicache bridge: --quantization-param-path decides about the bytes of fp8 KV, and "
                f"cannot be read: {error}"
            ) from error
        variant["quantization_param_path"] = digest
    return variant


def _canonical(text: str) -> str:
    """Normalize JSON; a text that is no JSON is returned as it is."""
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text


def rank_number(engine: EngineConfig, replica: int = 0) -> int:
    """Number the ranks that SGLang distinguishes, from 0: TP ranks first, then CP, PP and DP.

    Args:
        engine: its `dp_rank` is that of DP attention, and 0 in all replicas of plain DP.
        replica: number in plain DP, which excludes DP attention.
    """
    groups = (
        (engine.dp_rank or replica) * engine.pp_size + engine.pp_rank
    ) * engine.attn_cp_size + engine.attn_cp_rank
    return groups * engine.tp_size + engine.tp_rank


def rank_labels(engine: EngineConfig, replica: int = 0) -> dict[str, str]:
    """Return the labels of a rank, as in SGLang's own metrics; arguments as of `rank_number`."""
    return {
        "model_name": engine.model_name or "",
        "tp_rank": str(engine.tp_rank),
        "pp_rank": str(engine.pp_rank),
        "dp_rank": str(engine.dp_rank or replica),
    }


def logical_dtype(pool: object, declared: str = "", engine_kv_dtype: str = "") -> str:
    """Return the logical KV dtype of pages, which may differ from the pool's storage dtype.

    Raises:
        ConfigError: `declared` contradicts the dtype of a pool that is not opaque.
        InvalidPoolError: the pool's dtype is opaque, and neither the bridge nor the engine
            configures the logical one.
    """
    stored = str(getattr(pool, "dtype", "")).removeprefix("torch.")
    if stored not in OPAQUE_DTYPES:
        if declared and declared != stored:
            raise ConfigError(
                f"hicache bridge: kv_dtype is {declared!r}, and the KV host pool holds "
                f"{stored!r}; remove kv_dtype"
            )
        return stored
    logical = declared or ("" if engine_kv_dtype == "auto" else engine_kv_dtype)
    if not logical:
        raise InvalidPoolError(
            f"hicache bridge: the KV host pool stores {stored}, which does not tell fp8_e4m3 from "
            "fp8_e5m2; "
            'set "kv_dtype" in the extra config, or --kv-cache-dtype of the engine, to the one in '
            "use"
        )
    return logical


def is_logical(pool: object) -> bool:
    """Return True for a pool whose pages have no bytes: the side pools hold them (DeepSeek-V4)."""
    return getattr(pool, "size_per_token", None) == 0


def unserved_reason(
    engine: EngineConfig, pool: object, name: str, identity: StorageIdentity
) -> str:
    """Return why serving a side pool could deliver another rank's bytes.

    Empty if it is safe.
    """
    if engine.tp_size > 1 and identity.is_replicated(name) and _number(pool, "head_num"):
        return (
            "it holds this rank's heads, in a model whose KV is replicated over TP, and SGLang "
            "would store the first rank's heads for all"
        )
    return ""


def _number(pool: object, name: str) -> int:
    value: object = getattr(pool, name, None)
    return value if isinstance(value, int) else 0
