"""The engine's side of SGLang's storage interface: its types, its set-up of a driver, its host pools.

Equivalents where it is not installed. A case brings a pool of so many pages of so many bytes. What
the driver gets is one of SGLang's own pools with pages as long as that: two halves for multi-head
attention, one piece for latent attention, states for Mamba.
"""

from __future__ import annotations

import dis
import hashlib
import importlib
import inspect
import os
import re
from contextlib import contextmanager
from dataclasses import make_dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from hicache_conformance.harness.pools import slots_of
from hicache_conformance.interfaces.foreign_storage import element_type, load_class, torch_type
from hicache_conformance.model.case import NotPromised
from hicache_storage.spec import DriverUnavailableError, StorageIdentity

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    import torch

    from hicache_conformance.interfaces.interface import Setup
    from hicache_storage.spec import PageGeometry

INTERFACE_MODULE: Final = "sglang.srt.mem_cache.hicache_storage"
FACTORY_MODULE: Final = "sglang.srt.mem_cache.storage.backend_factory"
NAMESPACE_DIGITS: Final = 16
UNTOLD: Final = {
    "tp_lcm_size": None,
    "should_split_heads": False,
    "dcp_size": 1,
    "dcp_rank": 0,
    "logical_page_size": None,
}
"""Fields of SGLang's `HiCacheStorageConfig` that are at their defaults, for a class that does without
SGLang."""
KINDS: Final = {"kv": "mha", "swa": "mha", "draft": "mha", "mamba": "mamba", "indexer": "mla"}
"""What SGLang keeps in a pool of that name; KV that is replicated over TP is `mla`."""


@cache
def has_sglang() -> bool:
    """Return whether SGLang can be imported."""
    return find_spec("sglang") is not None


def types() -> Any:
    """The module of `PoolTransfer`, `PoolName` and others: SGLang's, or else the contract's.

    The contract's have the same names, fields and texts.
    """
    return importlib.import_module(INTERFACE_MODULE if has_sglang() else "hicache_storage.spec")


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
    if has_sglang():
        return types().HiCacheStorageConfig(**told)
    whole = told | UNTOLD
    return make_dataclass("HiCacheStorageConfig", whole)(**whole)


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
        DriverUnavailableError: it, or the engine it is a part of, cannot be imported.
    """
    if setup.target:
        # The engine hands its keyword arguments over as a dictionary, and there are none.
        return load_class(setup.target)(config, {})
    if not has_sglang():
        raise DriverUnavailableError(f"{setup.name} is a part of SGLang, which is not installed")
    factory: Any = importlib.import_module(FACTORY_MODULE).StorageBackendFactory
    return factory.create_backend(setup.backend, config, kv_pool)


def clears(setup: Setup) -> bool:
    """Return whether a dynamically loaded class promises that its `clear` removes pages.

    The base class' does nothing, so one that is empty, or says that it is a no-op, promises no more.
    """
    method = next(
        (
            vars(base)["clear"]
            for base in load_class(setup.target).__mro__
            if base.__name__ != "HiCacheStorage" and "clear" in vars(base)
        ),
        None,
    )
    documented = re.search(r"\bno-?op\b", (method and method.__doc__) or "", re.IGNORECASE)
    return method is not None and not documented and not _is_empty(method)


def _is_empty(method: object) -> bool:
    """Return whether a function has no body but a docstring, `pass` or `return`."""
    ends = {"RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"}
    return inspect.isfunction(method) and all(
        step.opname in ends and step.argval in (None, 0) for step in dis.get_instructions(method)
    )


@contextmanager
def environment(variables: Mapping[str, str]) -> Generator[None]:
    """Environment variables, for as long as a driver is constructed."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


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


class PlainPool:
    """A pool with the methods of SGLang's, over one row of pages.

    For drivers that work without SGLang.
    """

    def __init__(
        self, *, pages: int, page_size: int, page_bytes: int, dtype: torch.dtype, layout: str
    ) -> None:
        import torch

        self.layout = layout
        self.page_size = page_size
        self.page_num = pages
        self.logical_page_size = page_size
        self.size = pages * page_size
        # Elements that do not fill a page would be no elements.
        self.dtype = dtype if page_bytes % dtype.itemsize == 0 else torch.uint8
        self.kv_buffer = torch.zeros(pages, page_bytes // self.dtype.itemsize, dtype=self.dtype)
        self.size_per_token = page_bytes // page_size

    def get_size_per_token(self) -> int:
        """Bytes of a slot, all components together."""
        return self.size_per_token

    def get_ksize_per_token(self) -> int:
        """The same: there is one component."""
        return self.size_per_token

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """The page at slot `index`: a view, or, flat, a copy."""
        page = self.kv_buffer[int(index) // self.page_size]
        return page.clone() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """A blank page to read into."""
        return self.kv_buffer.new_zeros(self.kv_buffer.shape[1])

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Copy a flat page in."""
        self.kv_buffer[int(index) // self.page_size].copy_(data_page)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Address and length of each page."""
        pages = [int(slot) // self.page_size for slot in indices[:: self.page_size]]
        length = self.kv_buffer.shape[1] * self.kv_buffer.element_size()
        return [self.kv_buffer[page].data_ptr() for page in pages], [length] * len(pages)

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """The memory to register."""
        return [self.kv_buffer]


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
    if not has_sglang():
        return PlainPool(
            pages=pages,
            page_size=geometry.page_size,
            page_bytes=geometry.page_bytes,
            dtype=dtype,
            layout=layout,
        )
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
