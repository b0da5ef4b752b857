"""What callers get: prefixes that they can use, as lengths and slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.spec import HiCacheError

if TYPE_CHECKING:
    import torch


class StalePrefixError(HiCacheError, RuntimeError):
    """A prefix is not any more what it was when it was matched or inserted; match again."""

    code = "stale-prefix"


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Tokens whose cache can be used, as it is until something is evicted; `lock` keeps it so."""

    length: int
    """Tokens, whole pages."""
    device_indices: torch.Tensor
    """int64 (length - host_length,): the KV rows of the tokens that are on the device, from the first on."""
    host_length: int
    """The tokens after those, whose KV is on the host only."""
    node_id: int
    """Where the prefix ends, for the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class MatchResult(Prefix):
    """The longest usable prefix of a request."""

    state_slot: int | None
    """The device slot of the state after the prefix: a request copies it before it goes on. None where the model has no
    states, nothing matched, or the state is on the host only."""
    state_on_host: bool
    """Whether the state has to be loaded."""

    @property
    def needs_load(self) -> bool:
        """Whether anything has to come from the host before the prefix can be used."""
        return bool(self.host_length) or self.state_on_host


@dataclass(frozen=True, slots=True, eq=False)
class InsertResult(Prefix):
    """What the cache holds after an insertion; all of it is on the device."""

    new_states: int
    """States that it has kept; it gave the others back, having had them before."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadResult:
    """What is being loaded; `start_loading` launches it and names the counter of its layers."""

    device_indices: torch.Tensor
    """int64: the KV rows of the whole prefix."""
    state_slot: int | None
    """The request's slot that the state after the prefix is loaded into. None if it is on the device, or there is none."""


@dataclass(frozen=True, slots=True)
class PrefixLock:
    """Keeps a prefix on the tiers where it is, from `lock` to `unlock`."""

    lock_id: int
    length: int
    """Tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUsage:
    """What a cache holds."""

    device_tokens: int
    device_states: int
    host_tokens: int
    host_states: int
    evictable_tokens: int
    """Of those on the device."""
    evictable_states: int
    """Of those on the device."""
    locks: int
    declined_writes: int
    """Nodes that were not copied to the host for want of room there, since the cache was made."""
    dropped_tokens: int
    """Fetched from storage in vain: the prefix before them was evicted meanwhile, or found no room on the host."""
    tokens_stored_again: int
    """Handed to the storage a second time, as it had lost them while they were cached here."""
