"""Drivers with SGLang's storage interface, each a class that a command line names.

A right one, and wrong ones made of it.
"""

from __future__ import annotations

import threading
import time
from typing import ClassVar

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransferResult


class SampleStorage:
    """Keeps pages in this process, under names that hold everything the driver is told."""

    pages: ClassVar[dict] = {}
    lock = threading.Lock()

    def __init__(self, storage_config, kwargs):
        c = storage_config
        self.replicated = c.is_mla_model
        self.owner = (
            c.model_name,
            c.pp_rank,
            c.pp_size,
            c.attn_cp_rank,
            c.attn_cp_size,
            c.is_mla_model,
        )
        self.rank = (c.tp_rank, c.tp_size)
        self.pools = {}

    def register_mem_pool_host(self, mem_pool_host):
        self.pools["kv"] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        self.pools[str(host_pool_name)] = host_pool

    def on_host_pools_registered(self):
        pass

    def batch_exists(self, keys, extra_info=None):
        return self.leading("kv", keys)

    def batch_exists_v2(self, keys, pool_transfers=None, extra_info=None):
        kv = self.leading("kv", keys)
        legal, told = set(range(1, kv + 1)), {"kv": kv}
        for transfer in pool_transfers or ():
            pool = str(transfer.name)
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                ends = set(range(1, self.leading(pool, keys) + 1))
            else:
                window = max(1, len(transfer.keys or ()))
                there = [self.has(pool, key) for key in keys]
                ends = {
                    end for end in range(1, len(keys) + 1) if all(there[max(0, end - window) : end])
                }
            told |= {pool: max(ends)} if ends else {}
            legal &= ends
        return PoolTransferResult(max(legal, default=0), told, sorted(legal))

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        return self.read("kv", keys, host_indices)

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        return self.write("kv", keys, host_indices)

    def batch_get_v2(self, transfers, extra_info=None):
        return {t.name: self.read(str(t.name), t.keys, t.host_indices) for t in transfers}

    def batch_set_v2(self, transfers, extra_info=None):
        return {t.name: self.write(str(t.name), t.keys, t.host_indices) for t in transfers}

    def clear(self):
        with self.lock:
            own = {self.name(pool, "")[:-1] for pool in self.pools}
            for name in [name for name in self.pages if name[:-1] in own]:
                del self.pages[name]

    def name(self, pool, key):
        host, shared = self.pools[pool], self.replicated and pool == "kv"
        page = host.get_data_page(0, flat=True)
        geometry = (host.layout, str(page.dtype), str(host.dtype), page.numel(), host.page_size)
        return (self.owner, () if shared else self.rank, pool, geometry, key)

    def has(self, pool, key):
        return self.name(pool, key) in self.pages

    def leading(self, pool, keys):
        return next((index for index, key in enumerate(keys) if not self.has(pool, key)), len(keys))

    def read(self, pool, keys, host_indices):
        host, answers = self.pools[pool], []
        for index, key in enumerate(keys):
            page = self.pages.get(self.name(pool, key))
            if page is not None:
                host.set_from_flat_data_page(int(host_indices[index * host.page_size]), page)
            answers.append(page is not None)
        return answers

    def write(self, pool, keys, host_indices):
        host = self.pools[pool]
        for index, key in enumerate(keys):
            page = host.get_data_page(int(host_indices[index * host.page_size]), flat=True).clone()
            with self.lock:
                self.pages.setdefault(self.name(pool, key), page)
        return [True] * len(keys)


class Copies(SampleStorage):
    """The same in the older interface, where KV is handed over in copies."""

    batch_get_v1 = batch_set_v1 = None

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        return [self.pages.get(self.name("kv", key)) for key in keys]

    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None):
        for key, value in zip(keys, values, strict=True):
            with self.lock:
                self.pages.setdefault(self.name("kv", key), value.clone())
        return True


class KvAlone(SampleStorage):
    """Says of the methods that it does not implement that it does not."""

    def batch_get_v2(self, transfers, extra_info=None):
        raise NotImplementedError("side pools come in version 2")

    batch_set_v2 = batch_get_v2

    def clear(self):
        raise NotImplementedError


class Wrong(SampleStorage):
    """Has several faults, and answers a set for K and for V of each page, which is none."""

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        answers = super().batch_set_v1(keys, host_indices)
        return [ok for ok in answers for _ in "KV"]

    def read(self, pool, keys, host_indices):
        """Read the pages that are there into the first places; report them in their own."""
        there = [key for key in keys if self.has(pool, key)]
        super().read(pool, there, host_indices)
        return [self.has(pool, key) for key in keys]

    def write(self, pool, keys, host_indices):
        """Write over what exists, and publish pages of zeros 10 ms before."""
        blank = self.pools[pool].get_data_page(0, flat=True) * 0
        names = [self.name(pool, key) for key in keys]
        self.pages.update(dict.fromkeys(names, blank))
        time.sleep(0.01)
        for name in names:
            del self.pages[name]
        return super().write(pool, keys, host_indices)

    def clear(self):
        """Leave every other page."""
        left = dict([*self.pages.items()][::2])
        super().clear()
        self.pages.update(left)


class OtherForms(SampleStorage):
    """Answers a get with one truth value for all pages, and a set without its last page."""

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        return all(super().batch_get_v1(keys, host_indices))

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        return super().batch_set_v1(keys, host_indices)[:-1]


class NeedsWindows(SampleStorage):
    """Relies on the engine's windows, which have one page at least."""

    def batch_exists_v2(self, keys, pool_transfers=None, extra_info=None):
        for transfer in pool_transfers or ():
            if transfer.hit_policy != PoolHitPolicy.ALL_PAGES and not transfer.keys:
                raise ValueError("a window without pages")
        return super().batch_exists_v2(keys, pool_transfers, extra_info)


class Ends(SampleStorage):
    """Ends the process while it is constructed."""

    def __init__(self, storage_config, kwargs):
        raise SystemExit("no server")


class Blocks(SampleStorage):
    """Stores pages of whole blocks of 4 KiB, as files that are opened with O_DIRECT do."""

    def write(self, pool, keys, host_indices):
        page = self.pools[pool].get_data_page(0, flat=True)
        if page.numel() * page.element_size() % 4096:
            return [False] * len(keys)
        return super().write(pool, keys, host_indices)
