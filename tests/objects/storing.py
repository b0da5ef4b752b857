"""Pages in a storage, for tests to begin with."""

from __future__ import annotations


def stored(storage, pool, keys, pages):
    for seed, page in enumerate(pages, start=1):
        pool.fill(page, seed)
    assert storage.batch_set_v2([pool.transfer("kv", keys, pages)]) == {"kv": [True] * len(keys)}
