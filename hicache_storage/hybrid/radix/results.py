"""Results of the radix cache: prefixes as lengths and slots, locks, usage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.spec import HiCacheError

if TYPE_CHECKING:
    import torch


class StalePrefixError(HiCacheError, RuntimeError):
    """A prefix has changed since it was matched or inserted; match again."""

    code = "stale-prefix"


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Cached prefix of a request, valid until a part is evicted; `lock` keeps it."""

    length: int
    """Tokens, whole pages."""
    device_indices: torch.Tensor
    """int64 (length - host_length,): KV rows of the tokens on the device, from the first on."""
    host_length: int
    """Number of tokens after those, whose KV is on the host only."""
    node_id: int
    """Id of the node in which the prefix ends; used by the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class MatchResult(Prefix):
    """The longest usable prefix of a request."""

    state_slot: int | None
    """The device slot of the state after the prefix, which a request copies.

    None where the model has no states, nothing matched, or the state is on the host only.
    """
    state_on_host: bool
    """Whether the state has to be loaded."""

    @property
    def needs_load(self) -> bool:
        """True if the prefix has to be loaded from the host before it can be used."""
        return bool(self.host_length) or self.state_on_host


@dataclass(frozen=True, slots=True, eq=False)
class InsertResult(Prefix):
    """Prefix in the cache after an insertion; all of it is on the device."""

    new_states: int
    """Number of states that were inserted; the cache had the others, and freed their slots."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadResult:
    """A queued load; `start_loading` launches it and returns its layer counter."""

    device_indices: torch.Tensor
    """int64: the KV rows of the whole prefix."""
    state_slot: int | None
    """The request's slot that the state after the prefix is loaded into.

    None if the state is on the device, or there is none.
    """


@dataclass(frozen=True, slots=True)
class PrefixLock:
    """Keeps a prefix on the tiers where it is, from `lock` to `unlock`."""

    lock_id: int
    length: int
    """Tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUsage:
    """Contents and counters of a cache."""

    device_tokens: int
    device_states: int
    host_tokens: int
    host_states: int
    evictable_tokens: int
    """Tokens on the device that are not locked."""
    evictable_states: int
    """States on the device that are not locked."""
    locks: int
    declined_writes: int
    """Nodes that were not copied to the host for lack of memory, since the cache was made."""
    dropped_tokens: int
    """Tokens that were fetched in vain.

    The prefix before them was evicted meanwhile, or did not fit into host memory.
    """
    tokens_stored_again: int
    """Tokens stored again because the storage had lost them while they were cached here."""
