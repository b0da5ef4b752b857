"""A wrong byte says whose it is; pages of other lengths, and guards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hicache_conformance.harness.pools import (
    GuardedPool,
    Page,
    PagePatterns,
    canary,
    page_components,
    spent,
)
from hicache_conformance.model.settings import PAGE_VARIABLE
from hicache_storage.spec import StorageIdentity

IDENTITY = StorageIdentity(model="m", kv_dtype="bfloat16", page_size=2, layout="page_first")


def told(found: Page | bytes, length: int = 100) -> str:
    patterns, expected = PagePatterns(), Page(IDENTITY, "kv", "right")
    content = patterns.render(found, length) if isinstance(found, Page) else found
    return patterns.explain(content, expected)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Page(IDENTITY, "kv", "wrong"), "holds bytes of key 'wrong' at byte 0"),
        (Page(IDENTITY, "mamba", "right"), "holds bytes of pool 'mamba' at byte 0"),
        (Page(IDENTITY, "kv", "right", 3), "set number 3 of this key, not of number 0"),
        (
            Page(replace(IDENTITY, kv_dtype="float16"), "kv", "right"),
            "kv_dtype 'float16' (expected 'bfloat16')",
        ),
        (bytes(100), "holds zeros at byte 0 ("),
        (canary(7, 100), "was not written at byte 0"),
        (spent(100), "put into the host page after the set had returned"),
        (b"\x99" * 100, "bytes of no page of this run at byte 0: 9999"),
    ],
    ids=["key", "pool", "generation", "identity", "zeros", "canary", "spent", "noise"],
)
def test_a_wrong_page_is_explained(found, words):
    assert words in told(found)


def test_the_first_wrong_byte_counts():
    patterns, expected = PagePatterns(), Page(IDENTITY, "kv", "right")
    right = patterns.render(expected, 100)
    other = patterns.render(Page(IDENTITY, "kv", "wrong"), 100)
    assert "holds bytes of key 'wrong' at byte 48" in patterns.explain(
        right[:50] + other[50:], expected
    )
    assert "its own bytes in the wrong place at byte 16, taken from byte 0" in patterns.explain(
        right[:16] + right[:84], expected
    )
    assert "differs in its last 4 bytes" in patterns.explain(right[:-1] + b"\0", expected)


@pytest.mark.parametrize(
    ("components", "unit", "wanted"),
    [
        ((96, 160), 0, (96, 160)),
        ((96, 160), 8192, (6144, 10240)),
        # Half of the usual page, and twice as long as it.
        ((48, 80), 8192, (3072, 5120)),
        ((192, 320), 8192, (12288, 20480)),
        ((40,), 8192, (8192,)),
        ((3000, 5000), 4096, (3072, 5120)),
        ((8192, 8192), 8192, (8192, 8192)),
    ],
)
def test_pages_are_multiples_of_a_unit_and_keep_their_proportions(components, unit, wanted):
    assert page_components(components, unit) == wanted


def test_pools_take_their_page_length_from_the_run_unless_it_is_exact(monkeypatch):
    monkeypatch.setenv(PAGE_VARIABLE, "4096")
    assert GuardedPool().page_bytes == 8192
    assert GuardedPool(exact=True).page_bytes == 256


def test_a_broken_guard_is_seen():
    pool = GuardedPool(pages=2, components=(8,))
    view = pool.page_buffers([0])[0][0]
    memory = view.obj
    memory[memory.index(b"\xa7") + 63] = 0
    assert not pool.guards_intact()
