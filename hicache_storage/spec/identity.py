"""Identity of a storage, and its fingerprints: storages with equal ones share pages."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, fields

from hicache_storage.spec.errors import InvalidIdentityError
from hicache_storage.spec.transfers import PoolName

FINGERPRINT_BYTES = 16
"""Length of a fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageIdentity:
    """Everything that must agree for two processes' bytes to be interchangeable.

    Two storages share a pool's pages if and only if `fingerprint(pool)` is equal. A field decides
    about sharing unless its documentation says otherwise.

    Raises:
        InvalidIdentityError: a field is out of range or contradicts another.
    """

    model: str
    """Name or path of the model, chosen by the operator to distinguish models."""
    kv_dtype: str
    """Logical dtype: `fp8_e4m3` and `fp8_e5m2` are both one byte and are not the same."""
    page_size: int
    """Tokens per KV page."""
    layout: str
    """Host layout of the pools; equal sizes of two layouts hold different bytes."""
    revision: str = ""
    """Revision of the weights."""
    layer_start: int = 0
    """First layer held (inclusive)."""
    layer_end: int = 0
    """Last layer held (exclusive); 0 leaves the range to `pp_rank` and the pools' geometry."""
    head_start: int = 0
    """First KV head held (inclusive); ignored for pools replicated over TP, which hold all."""
    head_end: int = 0
    """Last KV head held (exclusive); 0 leaves the range to `tp_rank` and `tp_size`."""
    tp_rank: int = 0
    """Rank among those that share one PP stage and one CP shard; ignored for replicated pools."""
    tp_size: int = 1
    """Ignored for replicated pools, which hold the same bytes whatever the TP size."""
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dp_rank: int = 0
    """Ignored while `dp_replicated` holds."""
    dp_size: int = 1
    """Ignored while `dp_replicated` holds."""
    kv_replicated: bool = False
    """Every TP rank holds the same KV bytes (MLA, MQA)."""
    tp_sharded_pools: frozenset[str] = field(default_factory=lambda: frozenset({"mamba"}))
    """Pools that stay sharded over TP even where `kv_replicated`.

    Decides about sharing only through the pool asked.
    """
    dp_replicated: bool = True
    """DP ranks serve other requests with the same weights, so that equal keys mean equal bytes."""
    tenant: str = ""
    """Pages are shared only within a tenant."""
    adapter: str = ""
    """LoRA or other adapter that changes the KV."""
    salt: str = ""
    """Any text; changing it makes all pages stored so far invisible."""
    page_format: str = ""
    """Format of the bytes of a page where another engine defines them: the engine, its groups, its
    chunks; empty for the SDK's own pools and SGLang's, which `layout` describes."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "dp"):
            rank, size = getattr(self, f"{name}_rank"), getattr(self, f"{name}_size")
            if not 0 <= rank < size:
                raise InvalidIdentityError(
                    f"{name}_rank must be in [0, {name}_size): got {rank} of {size}"
                )
        if self.page_size < 1:
            raise InvalidIdentityError(f"page_size must be at least 1, got {self.page_size}")
        for name in ("layer", "head"):
            start, end = getattr(self, f"{name}_start"), getattr(self, f"{name}_end")
            if start < 0 or (end and end <= start):
                raise InvalidIdentityError(
                    f"{name}_start and {name}_end must satisfy 0 <= start < end: got {start}, {end}"
                )
        for name in ("model", "kv_dtype", "layout"):
            if not getattr(self, name):
                raise InvalidIdentityError(f"{name} must not be empty")
        # The dataclass is frozen; and a configuration file has a list, which has no hash.
        object.__setattr__(self, "tp_sharded_pools", frozenset(map(str, self.tp_sharded_pools)))

    def is_replicated(self, pool: str) -> bool:
        """Return True if all TP ranks hold the same bytes in this pool (rule ID-3)."""
        return self.kv_replicated and pool not in self.tp_sharded_pools

    def is_writer(self, pool: str) -> bool:
        """Return True if this rank writes the pool.

        Every rank writes a sharded pool, one rank a replicated one.
        """
        return self.tp_rank == 0 or not self.is_replicated(pool)

    def deciding_fields(self, pool: str) -> dict[str, str | int | bool]:
        """The fields that decide about sharing in `pool`, in declaration order."""
        # It decides through `is_replicated` alone: a pool that is added to it must not change the
        # fingerprints of the others.
        ignored = {"tp_sharded_pools"}
        if self.is_replicated(pool):
            # Otherwise engines of two TP sizes would store the same bytes twice and not find each
            # other's (rule ID-3).
            ignored |= {"tp_rank", "tp_size", "head_start", "head_end"}
        if self.dp_replicated:
            ignored |= {"dp_rank", "dp_size"}
        if not self.page_format:
            # Pages stored before there was this field keep their fingerprints.
            ignored.add("page_format")
        return {name: value for name, value in asdict(self).items() if name not in ignored}

    def fingerprint(self, pool: str = PoolName.KV) -> bytes:
        """Return 16 bytes that are equal for two identities exactly when they share pages.

        The pages are those of `pool`. Stable across releases.
        """
        # Imported here, so that pools and copies load without it.
        import msgspec

        # Sorted: a field that moves inside the class must not change the fingerprint, which would
        # empty every store. The number of the contract keeps the pages of another major version
        # apart.
        text = msgspec.json.encode(
            {"contract": 2, "pool": str(pool), **self.deciding_fields(pool)}, order="sorted"
        )
        return hashlib.blake2b(
            text, digest_size=FINGERPRINT_BYTES, person=b"hicache-ident-v2"
        ).digest()


IDENTITY_FIELDS = tuple(f.name for f in fields(StorageIdentity))
"""Names of all fields, for suites that want to try each."""
