"""The engine's side of SGLang's storage interface.

Its own types, or equivalents where it is not installed.
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

from hicache_conformance.interfaces.foreign_storage import load_class
from hicache_storage.spec import DriverUnavailableError, StorageIdentity

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from hicache_conformance.interfaces.interface import Setup

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
