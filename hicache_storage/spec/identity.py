"""Identity of a storage, and its fingerprints: storages with equal ones share pages."""

from __future__ import annotations

import hashlib
import math
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
    """Logical dtype: `fp8_e4m3` and `fp8_e5m2` are both one byte and are not the same.

    Of a `torch.dtype` the name is taken.
    """
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
    tp_replicated_pools: frozenset[str] = field(default_factory=frozenset[str])
    """Pools of which every TP rank holds the same bytes, beside KV that is sharded (rule ID-3).

    Decides about sharing only through the pool asked.
    """
    store_tp_size: int = 0
    """Number of shards of KV heads that sharded pools are stored in, for any TP size (rule ID-7).

    A multiple of `tp_size`; where KV heads are replicated over ranks, it may also be a divisor, the
    number of KV heads. 0 for one object for each TP rank. Ignored for pools that are replicated or
    in `tp_sharded_pools`.
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
        # Without an import of torch.
        if type(self.kv_dtype).__module__ == "torch":
            object.__setattr__(self, "kv_dtype", str(self.kv_dtype).removeprefix("torch."))
        for each in fields(self):
            value, kind = getattr(self, each.name), {"str": str, "int": int}.get(str(each.type))
            if kind and not isinstance(value, kind):
                raise InvalidIdentityError(
                    f"{each.name} must be of type {kind.__name__}, got {value!r}"
                )
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
        # The dataclass is frozen; and a configuration file has lists, which have no hash.
        for name in ("tp_sharded_pools", "tp_replicated_pools"):
            object.__setattr__(self, name, frozenset(map(str, getattr(self, name))))
        if both := self.tp_sharded_pools & self.tp_replicated_pools:
            raise InvalidIdentityError(
                f"tp_sharded_pools and tp_replicated_pools both name {min(both)!r}; name each pool "
                "in one of them"
            )
        if self.store_tp_size < 0:
            raise InvalidIdentityError(
                f"store_tp_size must be at least 1, or 0 for none: got {self.store_tp_size}"
            )
        if self.store_tp_size and not self.kv_replicated:
            self._check_shards()

    def _check_shards(self) -> None:
        """Check that this rank holds whole shards."""
        stored, size = self.store_tp_size, self.tp_size
        if stored % size and size % stored:
            raise InvalidIdentityError(
                f"store_tp_size must be a multiple of tp_size ({size}), got {stored}; pass "
                f"{math.lcm(stored, size)}, if there are as many KV heads"
            )
        if not self.head_end:
            if stored < size:
                # Ranks would share a shard, of which each might hold another part.
                raise InvalidIdentityError(
                    f"store_tp_size ({stored}) is less than tp_size ({size}), which is right only "
                    "where KV heads are replicated: pass head_start and head_end, or a multiple of "
                    "tp_size"
                )
            return
        shards, heads = self._held_shards(), self.head_end - self.head_start
        per_shard, rest = divmod(heads, len(shards))
        if rest or self.head_start != shards.start * per_shard:
            raise InvalidIdentityError(
                f"store_tp_size ({stored}) must divide the number of KV heads: TP rank "
                f"{self.tp_rank} of {size} holds the heads [{self.head_start}, {self.head_end}), "
                f"which are not the shards [{shards.start}, {shards.stop}) of {stored}"
            )

    def _held_shards(self) -> range:
        first = self.tp_rank * self.store_tp_size // self.tp_size
        return range(first, first + max(1, self.store_tp_size // self.tp_size))

    def is_replicated(self, pool: str) -> bool:
        """Return True if all TP ranks hold the same bytes in this pool (rule ID-3)."""
        return pool in self.tp_replicated_pools or (
            self.kv_replicated and pool not in self.tp_sharded_pools
        )

    def shards(self, pool: str) -> range:
        """Numbers of the shards of `store_tp_size` that this rank holds of a pool (rule ID-7).

        Empty where the pool is stored as one object for each rank, or one for all.
        """
        if (
            not self.store_tp_size
            or self.kv_replicated
            or pool in self.tp_sharded_pools
            or pool in self.tp_replicated_pools
        ):
            return range(0)
        return self._held_shards()

    def is_writer(self, pool: str) -> bool:
        """Return True if this rank writes the pool.

        One rank writes a replicated pool, or a shard that several ranks hold (rule ID-8). Every
        rank writes any other.
        """
        if self.is_replicated(pool):
            return self.tp_rank == 0
        holders = self.tp_size // self.store_tp_size if self.shards(pool) else 0
        return self.tp_rank % (holders or 1) == 0

    def deciding_fields(self, pool: str, shard: int | None = None) -> dict[str, str | int | bool]:
        """The fields that decide about sharing in `pool`, in declaration order.

        Args:
            pool: name of the pool.
            shard: one of `shards(pool)`. Without it the fields stand for all that this rank holds,
                in one object.
        """
        # They decide through `is_replicated` and `shards` alone: a pool that is added to one of
        # them must not change the fingerprints of the others.
        ignored = {"tp_sharded_pools", "tp_replicated_pools", "store_tp_size"}
        stored = dict[str, str | int | bool]()
        shards = self.shards(pool)
        if shards:
            # The same for every TP size of writers and readers.
            held = shards if shard is None else range(shard, shard + 1)
            stored = {
                "store_tp_size": self.store_tp_size,
                "shard_start": held.start,
                "shard_end": held.stop,
            }
        if shards or self.is_replicated(pool):
            # Otherwise engines of two TP sizes would store the same bytes twice and not find each
            # other's (rules ID-3 and ID-7).
            ignored |= {"tp_rank", "tp_size", "head_start", "head_end"}
        if self.dp_replicated:
            ignored |= {"dp_rank", "dp_size"}
        if not self.page_format:
            # Pages stored before there was this field keep their fingerprints.
            ignored.add("page_format")
        fields = {name: value for name, value in asdict(self).items() if name not in ignored}
        return {**fields, **stored}

    def fingerprint(self, pool: str = PoolName.KV, shard: int | None = None) -> bytes:
        """Return 16 bytes that are equal for two identities exactly when they share pages.

        The pages are those of `pool`, or their parts in one of its shards. Stable across releases.
        """
        # Imported here, so that pools and copies load without it.
        import msgspec

        # Sorted: a field that moves inside the class must not change the fingerprint, which would
        # empty every store. The number of the contract keeps the pages of another major version
        # apart.
        text = msgspec.json.encode(
            {"contract": 2, "pool": str(pool), **self.deciding_fields(pool, shard)}, order="sorted"
        )
        return hashlib.blake2b(
            text, digest_size=FINGERPRINT_BYTES, person=b"hicache-ident-v2"
        ).digest()


IDENTITY_FIELDS = tuple(f.name for f in fields(StorageIdentity))
"""Names of all fields, for suites that want to try each."""
