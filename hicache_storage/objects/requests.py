"""Requests of a call: its checked transfers, one for each pool.

Checked before any I/O (rule FT-2).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, cast

from hicache_storage.objects.namespace import Namespace
from hicache_storage.pools.shards import head_shards
from hicache_storage.spec import (
    InvalidPoolError,
    InvalidTransferError,
    PoolName,
    PoolPresence,
    PoolTransfer,
    UnknownPoolError,
    common_hit,
)
from hicache_storage.spec.arguments import check_keys, check_list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from hicache_storage.pools.access import PageAccess
    from hicache_storage.spec import PageGeometry, PoolTransferResult, StorageIdentity

FLOATS: Final = re.compile(r"b?float\d+|float8_(e\dm\d)(fn|fnuz)?")
"""Element types that tell the logical dtype; quantized KV is kept in integers, which do not."""


@dataclass(frozen=True, slots=True)
class RegisteredPool:
    """A host pool under its name: how to reach its pages and where they are stored."""

    name: PoolName
    access: PageAccess
    namespace: Namespace
    """Of a pool that is stored in shards, the namespace of its first; all have the same geometry."""
    shards: tuple[RegisteredPool, ...] = ()
    """Shards of KV heads, each with its own pages and namespace (rule ID-7)."""

    @property
    def parts(self) -> tuple[RegisteredPool, ...]:
        """The units that are stored as objects: the shards, or the pool itself."""
        return self.shards or (self,)


@dataclass(slots=True)
class PoolRequest:
    """All pages that a call moves in one pool."""

    pool: RegisteredPool
    keys: list[str]
    slots: list[int]
    """First slot of each page."""

    @property
    def parts(self) -> list[PoolRequest]:
        """The requests for the shards of the pages, or for the pages themselves."""
        if not self.pool.shards:
            return [self]
        return [PoolRequest(shard, self.keys, self.slots) for shard in self.pool.shards]


def registered_pool(
    identity: StorageIdentity, name: PoolName, access: PageAccess
) -> RegisteredPool:
    """Combine a host pool with the namespaces that its pages belong to.

    Raises:
        InvalidPoolError: the identity stores the pool in shards of KV heads, which it cannot be
            divided into.
    """
    numbers = identity.shards(name)
    if not numbers:
        return RegisteredPool(name, access, Namespace(identity, name, access.geometry))
    where = f"pool {name!r}"
    if identity.tp_size > identity.store_tp_size and name != PoolName.KV:
        # Its heads may be fewer or more than those of KV, and not replicated.
        raise InvalidPoolError(
            f"{where}: TP size {identity.tp_size} is more than store_tp_size "
            f"{identity.store_tp_size}, and it is not known whether this pool has its heads "
            "replicated as KV has; name it in tp_sharded_pools"
        )
    pages = head_shards(access, len(numbers), where)
    shards = tuple(
        RegisteredPool(name, part, Namespace(identity, name, part.geometry, number))
        for number, part in zip(numbers, pages, strict=True)
    )
    # Drivers that register memory look at `access`: the pool's own, unless it is copied anyway.
    return RegisteredPool(
        name, pages[0] if pages[0].stages else access, shards[0].namespace, shards
    )


def check_identity(
    identity: StorageIdentity, name: PoolName, host_pool: object, geometry: PageGeometry
) -> None:
    """Compare the identity with what the KV pool tells about its pages.

    Raises:
        InvalidPoolError: they differ; pages would be in a namespace that no other engine looks into.
    """
    if name != PoolName.KV:
        return  # Side pools have a layout, element types and page size of their own.
    told = dict[str, tuple[object, object]]()
    if identity.head_end and geometry.head_num and not identity.is_replicated(name):
        told["head_end"] = identity.head_end, identity.head_start + geometry.head_num
    # Pools of the SDK and of engines have these attributes; a bare geometry may be made up.
    if hasattr(host_pool, "layout"):
        told["page_size"] = identity.page_size, geometry.page_size
        # What follows is the tag of a format (`storage_format_tag`).
        told["layout"] = identity.layout, geometry.layout.partition("+")[0]
        kind = FLOATS.fullmatch(geometry.dtype)
        if kind and identity.kv_dtype != geometry.dtype:
            # Engines' names of fp8.
            told["kv_dtype"] = identity.kv_dtype, f"fp8_{kind[1]}" if kind[1] else geometry.dtype
    for field, (declared, found) in told.items():
        if declared != found:
            raise InvalidPoolError(
                f"pool {name!r} has another {field} than the identity: {found!r}, and not "
                f"{declared!r}; pass {field}={found!r}, or register the pool that is meant"
            )


def pool_requests(
    transfers: Sequence[PoolTransfer],
    pools: Mapping[PoolName, RegisteredPool],
    *,
    distinct_slots: bool,
) -> dict[PoolName, PoolRequest]:
    """Check the transfers of a get or set and join those of the same pool.

    Raises:
        UnknownPoolError: a pool was never registered.
        InvalidTransferError: keys or indices do not fit; the message names the pool and the
            argument.
    """
    check_transfers(transfers)
    requests: dict[PoolName, PoolRequest] = {}
    for transfer in transfers:
        pool = pools.get(transfer.name)
        if pool is None:
            known = ", ".join(sorted(pools)) or "none"
            raise UnknownPoolError(f"pool {transfer.name!r} is not registered; registered: {known}")
        keys, indices = _resolve(transfer, transfers)
        check_keys(keys, f"pool {transfer.name!r}: keys")
        slots = _first_slots(pool, len(keys), indices)
        request = requests.setdefault(transfer.name, PoolRequest(pool, [], []))
        request.keys.extend(keys)
        request.slots.extend(slots)
    if distinct_slots:
        for name, request in requests.items():
            if len(set(request.slots)) != len(request.slots):
                raise InvalidTransferError(
                    f"pool {name!r}: host_indices name a page twice; two keys cannot be read into "
                    "it"
                )
    return requests


def check_transfers(transfers: Sequence[PoolTransfer], where: str = "transfers") -> None:
    """Check that an argument is a list of transfers.

    Raises:
        InvalidTransferError: the argument is invalid.
    """
    check_list(transfers, where, "transfers")
    for transfer in cast("Sequence[object]", transfers):
        if not isinstance(transfer, PoolTransfer):
            raise InvalidTransferError(
                f"{where} must be a list of PoolTransfer, got {type(transfer).__name__}: "
                f"{transfer!r:.80}"
            )


def asked_pools(
    keys: Sequence[str], transfers: Sequence[PoolTransfer] | None
) -> dict[PoolName, None]:
    """Return the pools of a lookup, after a check of the keys and the policies' geometry.

    Raises:
        InvalidTransferError: a key or a policy's geometry is illegal.
    """
    check_keys(keys)
    if transfers is None:
        return {PoolName.KV: None}
    check_transfers(transfers, "pool_transfers")
    absent = [False] * len(keys)
    for transfer in transfers:
        PoolPresence.of(transfer, absent)
    return dict.fromkeys((PoolName.KV, *(transfer.name for transfer in transfers)))


def common_answer(
    keys: Sequence[str],
    transfers: Sequence[PoolTransfer] | None,
    present: Mapping[PoolName, list[bool]],
) -> PoolTransferResult:
    """Apply the policies to the pages that a lookup has found in each pool."""
    absent = [False] * len(keys)
    return common_hit(
        present.get(PoolName.KV, absent),
        [
            PoolPresence.of(transfer, present.get(transfer.name, absent))
            for transfer in transfers or ()
        ],
    )


def _resolve(
    transfer: PoolTransfer, transfers: Sequence[PoolTransfer]
) -> tuple[Sequence[str], torch.Tensor | None]:
    keys, indices = transfer.keys, transfer.host_indices
    if transfer.indices_from_pool is not None and (keys is None or indices is None):
        source = next(
            (t for t in transfers if t.name == transfer.indices_from_pool and t is not transfer),
            None,
        )
        if source is None:
            raise InvalidTransferError(
                f"pool {transfer.name!r}: indices_from_pool names {transfer.indices_from_pool!r}, "
                "of which there is no transfer in this call"
            )
        keys = source.keys if keys is None else keys
        indices = source.host_indices if indices is None else indices
    return cast("Sequence[str]", keys), indices


@cache
def _offsets(page_size: int) -> torch.Tensor:
    """Of the slots of a page from its first."""
    import torch

    return torch.arange(page_size, dtype=torch.int64, device="cpu")


def _first_slots(pool: RegisteredPool, pages: int, indices: torch.Tensor | None) -> list[int]:
    geometry = pool.namespace.geometry
    page_size, where = geometry.page_size, f"pool {pool.name!r}: host_indices"
    if indices is None:
        if pages:
            raise InvalidTransferError(
                f"{where} is None; pass {pages * page_size} slots for {pages} keys"
            )
        return []
    import torch

    given: object = indices  # callers are untyped engines
    if not isinstance(given, torch.Tensor) or given.dtype != torch.int64:
        kind = given.dtype if isinstance(given, torch.Tensor) else type(given).__name__
        raise InvalidTransferError(f"{where} must be an int64 tensor, got {kind}")
    if indices.device.type != "cpu":
        raise InvalidTransferError(f"{where} must be on the CPU, got {indices.device}")
    if indices.dim() != 1 or indices.numel() != pages * page_size:
        raise InvalidTransferError(
            f"{where} must have {pages} keys x {page_size} slots = {pages * page_size} entries in "
            f"one dimension, got shape {tuple(indices.shape)}"
        )
    if not pages:
        return []
    by_page = (
        indices.view(pages, page_size)
        if indices.is_contiguous()
        else indices.reshape(pages, page_size)
    )
    first = by_page[:, 0]
    # One comparison of tensors, not a loop: a call of 128 pages of 64 slots has 8192 indices.
    if page_size > 1 and not torch.equal(by_page, first.unsqueeze(1) + _offsets(page_size)):
        raise InvalidTransferError(f"{where} must hold pages of {page_size} consecutive slots")
    slots = cast("list[int]", first.tolist())
    if min(slots) < 0 or max(slots) + page_size > geometry.size:
        raise InvalidTransferError(
            f"{where} must lie in [0, {geometry.size}), got pages at {min(slots)} to {max(slots)}"
        )
    if page_size > 1 and any(slot % page_size for slot in slots):
        raise InvalidTransferError(f"{where} must start pages at multiples of {page_size}")
    return slots
