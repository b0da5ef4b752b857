"""Request of a prefetch, and the host pages that it reads into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hicache_storage.hybrid.storage_io.calls import page_transfer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.hybrid.pools.group import HostPoolGroup, PoolEntry
    from hicache_storage.spec import PoolName, PoolTransfer


@dataclass(frozen=True, slots=True)
class PrefetchRequest:
    """Pages that a prefetch asks for."""

    keys: tuple[str, ...]
    prefix_keys: tuple[str, ...]
    """Keys of the pages before them, from the start of the sequence."""
    request_id: str


class PrefetchBuffers:
    """Host slots of a prefetch in flight, and the pages that have arrived there.

    Pools of which a prefix needs only the last pages have one set of slots for each of at most two
    endpoints: while one set is written, the window in the other one stays complete.

    Args:
        group: the pools.
        slots: of pools that a prefix needs completely, by name: the anchor's and those of side
            pools.
        window_sets: of the other pools.
    """

    def __init__(
        self,
        group: HostPoolGroup,
        slots: Mapping[PoolName, torch.Tensor],
        window_sets: Sequence[Mapping[PoolName, torch.Tensor]],
    ) -> None:
        self.group = group
        self.slots = slots
        self.window_sets = window_sets
        # Guarded by the lock of the job that writes; read under that lock, or after the job ended.
        self.pages = 0
        """Leading pages that have arrived, in all pools of `slots`."""
        self.windows: dict[int, int] = {}
        """Endpoints whose windows have arrived, with the number of the window set."""

    def transfers(self, request: PrefetchRequest, start: int, end: int) -> list[PoolTransfer]:
        """Transfers of the pages [start, end) of all pools except those with windows."""
        found: list[tuple[PoolEntry, int, torch.Tensor]] = []
        for entry in self.group.entries.values():
            owner = self.group.owner(entry)
            if owner.name in self.slots:
                found.append((entry, owner.host_pool.page_size, self.slots[owner.name]))
        return [
            page_transfer(entry, request.keys[start:end], slots[start * size : end * size])
            for entry, size, slots in found
        ]

    def window_transfers(
        self, request: PrefetchRequest, endpoint: int, number: int
    ) -> list[PoolTransfer]:
        """Transfers of the windows that end at an endpoint, into one of the window sets."""
        transfers: list[PoolTransfer] = []
        for entry in self.group.entries.values():
            owner = self.group.owner(entry)
            if owner.is_trailing:
                ends = owner.window(endpoint)
                slots = self.window_sets[number][owner.name]
                # Near the start of a sequence a window has fewer pages than its slots.
                slots = slots[: len(ends) * owner.host_pool.page_size]
                # The state after p pages has the key of the last of them.
                keys = [request.keys[end - 1] for end in ends]
                transfers.append(page_transfer(entry, keys, slots))
        return transfers

    def is_complete(self, endpoint: int) -> bool:
        """Return whether the prefix of that length has arrived in all pools."""
        return endpoint <= self.pages and (endpoint in self.windows or not self.window_sets)

    def take_window_set(self) -> int | None:
        """Take a window set to read into.

        Returns its number, None where no pool has windows.

        Takes an empty set, or the one whose endpoint is the shortest.
        """
        used = {number: end for end, number in self.windows.items()}
        numbers = range(len(self.window_sets))
        taken = min(numbers, key=lambda number: used.get(number, 0), default=None)
        # Incomplete from now on: the read that follows overwrites it.
        self.windows = {end: number for end, number in self.windows.items() if number != taken}
        return taken

    def all_slots(self) -> dict[PoolName, torch.Tensor]:
        """Return all slots by pool, including those of the window sets."""
        slots = {name: [rows] for name, rows in self.slots.items()}
        for window_set in self.window_sets:
            for name, rows in window_set.items():
                slots.setdefault(name, []).append(rows)
        return {name: torch.cat(parts) for name, parts in slots.items()}
