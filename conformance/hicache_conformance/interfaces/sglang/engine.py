"""The engine's side of SGLang's storage interface: its types, its set-up of a driver, its host pools.

A case brings a pool of so many pages of so many bytes. What the driver gets is one of SGLang's own
pools with pages as long as that: two halves for multi-head attention, one piece for latent
attention, states for Mamba.
"""

from __future__ import annotations

import hashlib
import importlib
from typing import TYPE_CHECKING, Any, Final

from hicache_conformance.harness.pools import slots_of
from hicache_conformance.interfaces.foreign_storage import element_type, load_class, torch_type
from hicache_conformance.model.case import NotPromised

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from hicache_conformance.interfaces.interface import Setup
    from hicache_storage.spec import PageGeometry, StorageIdentity

types: Any = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
"""SGLang's module of `PoolTransfer`, `PoolName` and others."""
FACTORY_MODULE: Final = "sglang.srt.mem_cache.storage.backend_factory"
NAMESPACE_DIGITS: Final = 16
KINDS: Final = {"kv": "mha", "swa": "mha", "draft": "mha", "mamba": "mamba", "indexer": "mla"}
"""What SGLang keeps in a pool of that name; KV that is replicated over TP is `mla`."""


def storage_config(identity: StorageIdentity, layout: str, extra_config: Mapping[str, Any]) -> Any:
    """An identity as the engine's cache controller tells it to its driver."""
    told: dict[str, Any] = {
        "tp_rank": identity.tp_rank,
        "tp_size": identity.tp_size,
        "pp_rank": identity.pp_rank,
        "pp_size": identity.pp_size,
        "attn_cp_rank": identity.cp_rank,
        "attn_cp_size": identity.cp_size,
        "is_mla_model": identity.kv_replicated,
        "enable_storage_metrics": False,
        "is_page_first_layout": layout == "page_first",
        "model_name": identity.model,
        # Ranks that hold equal bytes are one rank to the engine.
        "dp_rank": 0 if identity.dp_replicated else identity.dp_rank,
        "extra_config": dict(extra_config),
    }
    return types.HiCacheStorageConfig(**told)


def namespace_suffix(identity: StorageIdentity) -> str:
    """Digest of the tenant, adapter and salt, which an engine hashes into every key.

    Its driver is not told of them.
    """
    text = repr((identity.tenant, identity.adapter, identity.salt)).encode()
    return "-" + hashlib.blake2b(text, digest_size=NAMESPACE_DIGITS // 2).hexdigest()


def construct(setup: Setup, config: Any, kv_pool: object) -> Any:
    """Make a driver as the engine makes it.

    By its factory, or, a dynamic one, by calling its class.

    Raises:
        DriverUnavailableError: it cannot be imported.
    """
    if setup.target:
        # The engine hands its keyword arguments over as a dictionary, and there are none.
        return load_class(setup.target)(config, {})
    factory: Any = importlib.import_module(FACTORY_MODULE).StorageBackendFactory
    return factory.create_backend(setup.backend, config, kv_pool)


def clears(setup: Setup) -> bool:
    """Return whether a dynamically loaded class has a `clear` of its own; the base class' does nothing."""
    method: object = getattr(load_class(setup.target), "clear", None)
    return method is not None and method is not types.HiCacheStorage.clear


class EnginePages:
    """Pages of a pool of SGLang's, by its own methods.

    Raises:
        NotPromised: SGLang has no pool with such pages, or none of that name.
    """

    def __init__(
        self, name: str, geometry: PageGeometry, identity: StorageIdentity, layout: str
    ) -> None:
        self.pool: Any = engine_pool(name, geometry, identity, layout)

    def indices(self, pages: Sequence[int]) -> torch.Tensor:
        """The slots of pages."""
        return slots_of(pages, int(self.pool.page_size))

    def content(self, page: int) -> bytes:
        """The bytes of a page."""
        import torch

        flat: torch.Tensor = self.pool.get_data_page(page * int(self.pool.page_size), flat=True)
        return flat.contiguous().view(torch.uint8).numpy().tobytes()

    def put(self, page: int, content: bytes) -> None:
        """Replace the bytes of a page."""
        import torch

        blank: torch.Tensor = self.pool.get_dummy_flat_data_page()
        flat = (
            torch.frombuffer(bytearray(content), dtype=torch.uint8)
            .view(blank.dtype)
            .reshape(blank.shape)
        )
        self.pool.set_from_flat_data_page(page * int(self.pool.page_size), flat)


def engine_pool(name: str, geometry: PageGeometry, identity: StorageIdentity, layout: str) -> Any:
    """A pool of SGLang's for the pages of `geometry`.

    Raises:
        NotPromised: SGLang has no pool with such pages, or none of that name.
    """
    kind = "mla" if name == "kv" and identity.kv_replicated else KINDS.get(name, "")
    if not kind:
        raise NotPromised(f"SGLang has no pool named {name!r}")
    dtype = torch_type(element_type(geometry, identity))
    pages = geometry.size // geometry.page_size
    if kind == "mamba":
        return _mamba(
            pages, geometry.page_bytes, layout if layout.startswith("page_first") else "page_first"
        )
    return _attention(kind, pages, geometry, dtype, layout)


def _attention(
    kind: str, pages: int, geometry: PageGeometry, dtype: torch.dtype, layout: str
) -> Any:
    halves = 2 if kind == "mha" else 1
    row, rest = divmod(geometry.page_bytes, halves * geometry.page_size * dtype.itemsize)
    if rest or not row:
        raise NotPromised(
            f"SGLang's {kind.upper()} pools have no pages of {geometry.page_bytes} bytes in "
            f"{geometry.page_size} slots"
        )
    layers, dim = (2, row // 2) if row % 2 == 0 else (1, row)
    size = pages * geometry.page_size
    memory: Any = importlib.import_module("sglang.srt.mem_cache.memory_pool")
    common = {
        "size": size,
        "page_size": geometry.page_size,
        "dtype": dtype,
        "layer_num": layers,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if kind == "mha":
        device = memory.MHATokenToKVPool(head_num=1, head_dim=dim, **common)
        host_class: Any = importlib.import_module(
            "sglang.srt.mem_cache.pool_host.mha"
        ).MHATokenToKVPoolHost
        more: dict[str, int] = {}
    else:
        device = memory.MLATokenToKVPool(kv_lora_rank=dim, qk_rope_head_dim=0, **common)
        host_class = importlib.import_module(
            "sglang.srt.mem_cache.pool_host.mla"
        ).MLATokenToKVPoolHost
        more = {"target_layer_num": layers}
    return host_class(
        device.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        geometry.page_size,
        layout,
        pin_memory=False,
        device_capacity_tokens=size,
        start_layer=0,
        end_layer=layers,
        **more,
    )


def _mamba(pages: int, page_bytes: int, layout: str) -> Any:
    import torch

    temporal = page_bytes // 2 // 4 * 4
    convolution, rest = divmod(page_bytes - temporal, 2)
    if rest or not temporal:
        raise NotPromised(f"SGLang's Mamba pool has no pages of {page_bytes} bytes")
    info_class: Any = importlib.import_module(
        "sglang.srt.mem_cache.device_pool_info"
    ).MambaStateBufferInfo
    info = info_class(
        temporal=torch.zeros(1, pages, 1, temporal // 4, dtype=torch.float32),
        conv=(torch.zeros(1, pages, 1, convolution, dtype=torch.bfloat16),),
        extra_checkpoint_buffers=(),
    )
    pool_class: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.mamba").MambaPoolHost
    return pool_class(info, 1.0, 0, device_capacity=pages, pin_memory=False, layout=layout)
