"""Host pools, transfers of a storage's calls and their results: names, policies, hits."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Protocol, Self, runtime_checkable

from hicache_storage.spec.errors import InvalidTransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

MAX_KEY_BYTES = 512
"""Longest legal page key, in bytes of UTF-8 (rule ID-5)."""

_POOL_NAME = re.compile(r"[a-z0-9_]{1,64}")


class PoolName(str):
    """Name of one kind of cached state; equal to, and hashing as, its plain string.

    Any name of `[a-z0-9_]{1,64}` is legal; the well-known ones are constants of the class.

    Raises:
        InvalidTransferError: the name does not match that pattern.
    """

    __slots__ = ()

    KV: ClassVar[PoolName]
    MAMBA: ClassVar[PoolName]
    SWA: ClassVar[PoolName]
    INDEXER: ClassVar[PoolName]
    DRAFT: ClassVar[PoolName]

    def __new__(cls, name: str) -> Self:
        # Every transfer of every call converts its names: one that is a `PoolName` has been
        # checked.
        if isinstance(name, cls):
            return name
        given: object = name  # callers are untyped engines
        if not isinstance(given, str):
            raise InvalidTransferError(f"a pool's name is a text such as 'kv', got {given!r:.80}")
        # An enum member that is a str (SGLang's PoolName) prints as its class; its text is what
        # str.__str__ sees.
        text = str.__str__(name)
        if not _POOL_NAME.fullmatch(text):
            raise InvalidTransferError(f"pool name {text!r} is not of the form [a-z0-9_]{{1,64}}")
        return super().__new__(cls, text)


# Not in the class body, where the class does not exist yet.
PoolName.KV = PoolName("kv")
PoolName.MAMBA = PoolName("mamba")
PoolName.SWA = PoolName("swa")
PoolName.INDEXER = PoolName("indexer")
PoolName.DRAFT = PoolName("draft")


class PoolHitPolicy(StrEnum):
    """Pages of a pool that must exist for a prefix of p pages to be restorable."""

    ALL_PAGES = "all_pages"
    """Pages [0, p) (rule EX-2)."""
    TRAILING_PAGES = "trailing_pages"
    """Pages [max(0, p - n), p) (rule EX-3).

    n is the number of keys in the transfer, at least 1.
    """
    BLOCK_GROUPS = "block_groups"
    """Never decides about p (rule EX-4).

    The pool only reports what its leading complete groups cover.
    """


@dataclass(slots=True)
class PoolTransfer:
    """One pool's share of a batched call.

    `keys[i]` names the page whose slots are `host_indices[i * page_size : (i + 1) * page_size]`.

    Raises:
        InvalidTransferError: a pool's name, the policy or the geometry of its blocks is invalid.
    """

    name: PoolName
    """The pool; a plain string is accepted and converted."""
    host_indices: torch.Tensor | None = None
    """int64 on the CPU, `len(keys) * page_size` slots of the pool's host buffer.

    Pages of consecutive slots.
    """
    device_indices: torch.Tensor | None = None
    """Slots of the device pool; storage ignores them."""
    keys: Sequence[str] | None = None
    """Page keys, each at most 512 bytes of UTF-8.

    For `batch_exists_v2` only their number counts (the window).
    """
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[object] | None = None
    """The cache nodes this transfer covers; storage ignores them."""
    indices_from_pool: PoolName | None = None
    """Pool whose transfer in the same call lends its indices (and keys, where `keys` is None)."""
    block_pages: int = 0
    """`BLOCK_GROUPS` only: pages of the prefix that one block spans."""
    group_pages: int = 0
    """`BLOCK_GROUPS` only: pages kept for each block, the last ones of it; 0 means all of them."""

    def __post_init__(self) -> None:
        self.name = PoolName(self.name)
        try:
            # Plain strings are accepted; `policies.py` compares with `is`, so the field must be the
            # member.
            self.hit_policy = PoolHitPolicy(self.hit_policy)
        except ValueError:
            known = ", ".join(PoolHitPolicy)
            raise InvalidTransferError(
                f"pool {self.name!r}: hit_policy {self.hit_policy!r:.80} is none of {known}"
            ) from None
        for field_name, pages in (
            ("block_pages", self.block_pages),
            ("group_pages", self.group_pages),
        ):
            given: object = pages  # callers are untyped engines
            if not isinstance(given, int):
                raise InvalidTransferError(
                    f"pool {self.name!r}: {field_name} must be a number of pages, got {given!r:.80}"
                )
        if self.indices_from_pool is not None:
            self.indices_from_pool = PoolName(self.indices_from_pool)


@dataclass(frozen=True, slots=True)
class PoolTransferResult:
    """Answer of `batch_exists_v2`."""

    kv_hit_pages: int
    """Longest prefix, in pages, that every pool can restore; 0 if there is none (rule EX-1)."""
    extra_pool_hit_pages: dict[PoolName, int] = field(default_factory=dict["PoolName", int])
    """Each pool's own longest legal endpoint, `kv` included, 0 where it has none (rule EX-6)."""
    restorable_prefix_pages: list[int] = field(default_factory=list[int])
    """Every common legal endpoint, ascending, so that ranks can intersect them (rule EX-5)."""


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Shape of a pool's pages; part of the namespace that its pages are stored under."""

    layout: str
    """Order of the bytes of the components."""
    dtype: str
    """Name of the element type, without the `torch.` prefix."""
    page_size: int
    """Slots per page."""
    size: int
    """Slots in the pool; does not decide about sharing."""
    component_bytes: tuple[int, ...]
    """Length of each component of a page, in bytes, in their fixed order."""
    head_num: int = 0
    """KV heads in a page; 0 for a pool that has none, or does not tell.

    Does not decide about sharing.
    """
    head_rows: tuple[int, ...] = ()
    """Of each component, the number of its rows, where there are KV heads.

    A row has the bytes of each head, one after the other and equally long. `page_head` has one row
    a component.
    """

    @property
    def page_bytes(self) -> int:
        """Length of a page, in bytes."""
        return sum(self.component_bytes)


@runtime_checkable
class HostPool(Protocol):
    """A host pool that lends its memory.

    The SDK's own pools, and any other that offers these two members.
    """

    @property
    def geometry(self) -> PageGeometry: ...

    def page_buffers(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        """For each page, its components as writable byte views of the pool itself.

        Pages are given by their first slots.

        The views stay valid as long as the pool lives. `first_slots` are aligned to the page size
        and in range; the caller has checked them.
        """
        ...
