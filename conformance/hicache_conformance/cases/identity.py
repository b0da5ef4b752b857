"""Isolation of identities, field by field; pools that are replicated or sharded over TP; and keys.

Keys are opaque: any legal text names its own page, and no text leads out of the store.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from hicache_conformance.harness.pools import GuardedPool, canary, kv_and_state, short, slots_of
from hicache_conformance.harness.storage_under_test import PageGroup, StorageUnderTest, check_each
from hicache_conformance.model.case import check, covers
from hicache_conformance.model.rules import Level
from hicache_storage.spec import (
    IDENTITY_FIELDS,
    MAX_KEY_BYTES,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_conformance.fixtures.context import CaseContext


# Every range given and nothing replicated, so that each field decides by itself. TP rank 0, because
# it writes replicated pools too.
BASE: Final[Mapping[str, object]] = {
    "revision": "main",
    "layer_start": 4,
    "layer_end": 8,
    "head_start": 2,
    "head_end": 4,
    "tp_rank": 0,
    "tp_size": 4,
    "pp_rank": 1,
    "pp_size": 4,
    "cp_rank": 1,
    "cp_size": 4,
    "dp_rank": 1,
    "dp_size": 4,
    "dp_replicated": False,
    "tenant": "a",
    "adapter": "b",
}
OTHER: Final[Mapping[str, object]] = {
    "model": "conformance-model",
    "kv_dtype": "float16",
    "page_size": 4,
    "layout": "layer_first",
    "revision": "main2",
    "layer_start": 5,
    "layer_end": 9,
    "head_start": 1,
    "head_end": 5,
    "tp_rank": 2,
    "tp_size": 8,
    "pp_rank": 2,
    "pp_size": 8,
    "cp_rank": 2,
    "cp_size": 8,
    "dp_rank": 2,
    "dp_size": 8,
    "kv_replicated": True,
    "dp_replicated": True,
    "tenant": "A",
    "adapter": "",
    "salt": "another salt",
    "page_format": "another format",
}
DECIDING: Final = tuple(
    name
    for name in IDENTITY_FIELDS
    if name not in ("tp_sharded_pools", "tp_replicated_pools", "store_tp_size")
)
"""Fields of which a difference keeps pages apart. The sets of pools speak about pools, which ID-3
tests; `store_tp_size` needs pools with KV heads, which ID-7 tests."""

ALIKE: Final[Mapping[str, tuple[Mapping[str, object], Mapping[str, object]]]] = {
    "fp8-kinds": ({"kv_dtype": "fp8_e4m3"}, {"kv_dtype": "fp8_e5m2"}),
    "separators": ({"model": "a/b"}, {"model": "a-b"}),
    "case": ({"model": "Qwen"}, {"model": "qwen"}),
    "prefix": ({"model": "model"}, {"model": "model_1"}),
    "tenant-and-adapter": ({"tenant": "x", "adapter": ""}, {"tenant": "", "adapter": "x"}),
    "text-that-moves-over": ({"tenant": "ab", "adapter": "c"}, {"tenant": "a", "adapter": "bc"}),
    "text-with-a-separator": ({"tenant": "a_b", "adapter": "c"}, {"tenant": "a", "adapter": "b_c"}),
    "model-and-revision": ({"model": "m_r", "revision": ""}, {"model": "m", "revision": "r"}),
    "tp-and-cp": ({"tp_rank": 1, "cp_rank": 2}, {"tp_rank": 2, "cp_rank": 1}),
    "pp-and-dp": ({"pp_rank": 1, "dp_rank": 2}, {"pp_rank": 2, "dp_rank": 1}),
    "tp-1-of-12-and-11-of-2x": ({"tp_rank": 1, "tp_size": 12}, {"tp_rank": 11, "tp_size": 12}),
    "layer-ranges": ({"layer_start": 1, "layer_end": 23}, {"layer_start": 12, "layer_end": 23}),
}
"""Pairs that differ, and look alike to whoever pastes fields together."""

GEOMETRIES: Final[Mapping[str, Mapping[str, object]]] = {
    "layout": {"layout": "layer_first"},
    "dtype": {"dtype": "float16"},
    "component-split": {"components": (160, 96)},
    "component-count": {"components": (256,)},
    "page-bytes": {"components": (96, 161)},
    "half-page-bytes": {"components": (48, 80)},
    "page-size": {"page_size": 4},
}
"""What may differ between two pools of equal identity; the last engine to be reconfigured finds the
pages of the one before."""

BOTH: Final = (Level.POOLS, Level.IDENTITY)


class IdentityCases:
    """ID-1 to ID-4."""

    @covers("ID-1", levels=Level.IDENTITY)
    def test_another_tp_size(self, context: CaseContext) -> None:
        """An engine of one rank that is started again with two, and nothing else is different."""
        one = context.identity()
        two = replace(one, tp_size=2)
        _keep_apart(context.storage(one), context.storage(two), context.keys(4), "ID-1")

    @covers("ID-1", levels=Level.IDENTITY)
    @pytest.mark.parametrize("field", DECIDING)
    def test_one_field_differs(self, context: CaseContext, field: str) -> None:
        """Identities that differ in one field alone."""
        one = context.identity(**BASE)
        two = replace(one, **{field: OTHER[field]})  # type: ignore[arg-type]
        _keep_apart(context.storage(one), context.storage(two), context.keys(4), "ID-1")

    @covers("ID-1", levels=Level.IDENTITY)
    @pytest.mark.parametrize("pair", ALIKE.values(), ids=ALIKE.keys())
    def test_identities_that_look_alike(
        self, context: CaseContext, pair: tuple[Mapping[str, object], Mapping[str, object]]
    ) -> None:
        """Identities that are one text where fields are pasted together."""
        base = context.identity(**BASE)
        one, two = (replace(base, **fields) for fields in pair)  # type: ignore[arg-type]
        _keep_apart(context.storage(one), context.storage(two), context.keys(4), "ID-1")

    @covers("ID-1", levels=Level.IDENTITY)
    @pytest.mark.parametrize("difference", GEOMETRIES.values(), ids=GEOMETRIES.keys())
    def test_one_geometry_differs(
        self, context: CaseContext, difference: Mapping[str, object]
    ) -> None:
        """Equal identities whose pools have pages of another layout, element type or length."""
        base = context.identity()
        one = context.storage(base)
        two = context.storage(base, pools={PoolName.KV: GuardedPool(**difference)})  # type: ignore[arg-type]
        keys = context.keys(8)
        for writer, reader, half in ((one, two, keys[:4]), (two, one, keys[4:])):
            # A driver that refuses pages breaks another rule than this one, and is judged below.
            writer.set(half)
            reader.expect_missing(half, rule="ID-1", why="was set from a pool of another geometry")
        for writer, half in ((one, keys[:4]), (two, keys[4:])):
            writer.store(half)
            writer.expect(half)

    @covers("ID-1", levels=Level.IDENTITY)
    def test_a_pool_is_registered_again_with_another_geometry(self, context: CaseContext) -> None:
        """Pages of the former geometry are missing, and there again when that one is back."""
        sut, keys = context.stored(4)
        # As many bytes, in components of other lengths.
        other = context.with_pool(sut, PoolName.KV, GuardedPool(components=(160, 96)))
        other.expect_missing(keys, rule="ID-1", why="was set from a pool of another geometry")
        again = context.with_pool(other, PoolName.KV, GuardedPool())
        again.expect(keys)

    @covers("ID-4", levels=Level.IDENTITY)
    @pytest.mark.parametrize("ranks", ["pp", "cp", "dp"])
    def test_ranks_of_one_group(self, context: CaseContext, ranks: str) -> None:
        """Four ranks write the same keys, each its own bytes; each reads back its own."""
        base, keys = context.identity(**{**BASE, f"{ranks}_rank": 0}), context.keys(4)
        group = [context.storage(replace(base, **{f"{ranks}_rank": rank})) for rank in range(4)]  # type: ignore[arg-type]
        _keep_apart(group[0], group[1], context.keys(2), "ID-4")
        for rank in group:
            rank.store(keys)
        for rank in group:
            rank.expect_own(keys, rule="ID-4")

    @covers("ID-2", levels=Level.IDENTITY, needs=["sharing>=process"])
    def test_equal_identities_share(self, context: CaseContext) -> None:
        """Two storages of one process, one after the other as writer and reader."""
        one = context.storage(context.identity(**BASE), pools=kv_and_state())
        two = context.storage(replace(one.identity), pools=kv_and_state())
        for writer, reader in ((one, two), (two, one)):
            keys = context.keys(4)
            for pool in reader.memories:
                reader.expect_missing(keys, pool, rule="ID-2", why="was never set")
            writer.store_many([PageGroup(keys, pool) for pool in writer.memories])
            writer.expect(keys)
            for pool in reader.memories:
                reader.expect(keys, pool, rule="ID-2")
            reader.expect_existing(keys, rule="ID-2")

    @covers("ID-2", levels=Level.IDENTITY, needs=["sharing>=process"])
    def test_what_does_not_decide(self, context: CaseContext) -> None:
        """DP ranks that serve the same weights share, whatever their rank."""
        one = context.storage(context.identity(**{**BASE, "dp_replicated": True}))
        two = context.storage(replace(one.identity, dp_rank=3))
        keys = context.keys(4)
        one.store(keys)
        one.expect(keys)
        two.expect(keys, writer=one.identity, rule="ID-2")

    @covers("ID-2", levels=Level.IDENTITY, needs=["durability>=reopen"])
    def test_pages_survive_reopening(self, context: CaseContext) -> None:
        """All storages are closed; one that is opened afterwards finds the pages of every pool."""
        one, keys = context.storage(context.identity(**BASE), pools=kv_and_state()), context.keys(8)
        one.store_many([PageGroup(keys, pool) for pool in one.memories])
        one.expect(keys)
        one.call("close", one.storage.close)
        two = context.storage(replace(one.identity), pools=kv_and_state())
        for pool in two.memories:
            two.expect(keys, pool, rule="ID-2")
        two.expect_existing(keys, rule="ID-2")

    @covers("ID-3", levels=BOTH)
    def test_only_the_writer_writes(self, context: CaseContext) -> None:
        """A rank that is not the writer stores no replicated KV, alone or beside its own state."""
        writer, other = _ranks(context, 2)
        keys, wanted = context.keys(4), {"kv": [False] * 4, "mamba": [True] * 4}
        for pools in (["kv"], ["kv", "mamba"]):
            answer = other.set_many([PageGroup(keys, pool) for pool in pools])
            told = f"rank 1 is not the writer of kv, and its set in {pools} answers {answer}"
            check(answer == {pool: wanted[pool] for pool in pools}, "ID-3", told)
        for rank in (other, writer):
            rank.expect_missing(keys, rule="ID-3", why="was set by a rank that is not the writer")

    @covers("ID-3", levels=BOTH, needs=["sharing>=process"])
    def test_all_ranks_read_the_writer_s_pages(self, context: CaseContext) -> None:
        """Pages set by rank 0 are found by every rank, whose sets change nothing."""
        ranks = _ranks(context, 4)
        keys = context.keys(4)
        ranks[0].store(keys[:3])
        ranks[0].expect(keys[:3])
        for rank in ranks[1:]:
            rank.expect(keys[:3], writer=ranks[0].identity, rule="ID-3")
            rank.expect_existing(keys[:3], rule="ID-3")
            answer = rank.set(keys)
            check(
                answer == [True, True, True, False],
                "ID-3",
                f"rank {rank.identity.tp_rank} sets 3 pages that exist and 1 that does not; it "
                f"answers {answer}",
            )
            rank.expect(keys[:3], writer=ranks[0].identity, rule="ID-3")

    @covers("ID-3", levels=BOTH, needs=["sharing>=process"])
    def test_replicated_pages_outlive_the_tp_size(self, context: CaseContext) -> None:
        """Replicated bytes are the same for every TP size, so another TP size finds them."""
        two = _ranks(context, 2)
        keys = context.keys(3)
        two[0].store(keys)
        two[0].expect(keys)
        other = replace(two[0].identity, tp_size=8, tp_rank=5)
        eight = context.storage(other, pools=kv_and_state())
        eight.expect(keys, writer=two[0].identity, rule="ID-3")

    @covers("ID-3", levels=BOTH)
    def test_sharded_state_beside_replicated_kv(self, context: CaseContext) -> None:
        """Every rank finds its own Mamba state alone, and no rank of another TP size does."""
        ranks = _ranks(context, 4)
        keys, alone = context.keys(3), context.keys(3)
        ranks[0].store(alone, PoolName.MAMBA)
        ranks[0].expect(alone, PoolName.MAMBA)
        wider = context.storage(replace(ranks[0].identity, tp_size=8), pools=kv_and_state())
        why = "was set by TP rank 0 of 4 in a pool that is sharded"
        for reader in (ranks[1], wider):
            reader.expect_missing(alone, PoolName.MAMBA, rule="ID-3", why=why)
        for rank in ranks:
            refused = f"of a sharded pool was refused to TP rank {rank.identity.tp_rank}"
            check_each(keys, rank.set(keys, PoolName.MAMBA), "ID-3", refused)
        for rank in ranks:
            rank.expect_own(keys, PoolName.MAMBA, rule="ID-3")


def _keep_apart(one: StorageUnderTest, two: StorageUnderTest, keys: list[str], rule: str) -> None:
    """Each writes and the other must not see it.

    Then both have the same keys, each with its own bytes.
    """
    for writer, reader, half in ((one, two, keys[::2]), (two, one, keys[1::2])):
        writer.set(half)
        writer.get(half)
        reader.expect_missing(
            half, rule=rule, why="was set under another identity", writer=writer.identity
        )
    # A driver that refuses pages, or cannot read its own, breaks another rule than this one.
    for writer, half in ((one, keys[::2]), (two, keys[1::2])):
        writer.store(half)
        writer.expect(half)
    for sut in (one, two):
        sut.store(keys)
    for sut in (one, two):
        sut.expect_own(keys, rule=rule)


def _ranks(context: CaseContext, size: int) -> list[StorageUnderTest]:
    """All TP ranks of a model whose KV is replicated and whose Mamba state is not."""
    base = context.identity(kv_replicated=True, tp_size=size)
    return [
        context.storage(replace(base, tp_rank=rank), pools=kv_and_state()) for rank in range(size)
    ]


KEYS: Final = (
    *("", " ", ".", "..", "...", "/", "//", "a", "A", "a ", " a", "a.", "a/", "/a", "./a", "a/."),
    *("a//b", "a/b", "a-b", "a_b", "a b", "a\\b", "a:b", "a|b", "a?b", "a*b", "a%2Fb", "a%2fb"),
    *("a+b", "a\nb", "a\tb", "a\rb", "a\x01b", "a\x7fb", "a'b", 'a"b', "a;b", "a$b", "$HOME"),
    *("~", "~root", "-rf", "--", "{tmp}", "%s", "%00", "\\0", "null", "None", "CON", "nul.txt"),
    *("kv", "kv/a", "mamba/a", "../escape", "../../escape", "../../../../escape"),
    *("a/../../../../escape", "/tmp/hicache-conformance-escape", "..\\escape", "key", "KEY"),
    *("Key", "\u00e9", "e\u0301", "\u00c9", "\u212b", "\u00c5", "\u03c3", "\u03c2", "\u0131"),
    *("i", "I", "\u0130", "\u65e5\u672c", "\U0001f600", "\u200b", "\u202e", "\ufeff", "\ufffe"),
    *("\ud7ff", "\ue000", "\U0010ffff", "\u0661", "1", "\uff11"),
    # Of one hash: CRC-32, FNV-1a of 32 bits twice, 31 h + c, 33 h ^ c.
    *("plumless", "buckeroo", "costarring", "liquid", "declinate", "macallums", "Aa", "BB"),
    *("hetairas", "mentioner"),
)
"""Texts that file names, URLs, shells, file systems and other people's naming schemes treat in some
way of their own."""


ESCAPED: Final = "hicache-conformance-escape*"
"""What the one of them that is an absolute path leaves behind where it leads out."""


class KeyCases:
    """ID-5 and ID-6."""

    @covers("ID-5", "ID-6", levels=Level.IDENTITY)
    def test_every_key_is_its_own(self, context: CaseContext) -> None:
        """Each odd key is absent until it is set; in the end each has its own bytes."""
        sut, keys = context.storage(), [*KEYS, *_long_keys(context)]
        for key in keys:
            shown = f"key {key!r:.100} was set, and"
            sut.expect_missing([key], rule="ID-5", why="was never set")
            check(
                sut.set([key]) == [True],
                "ID-5",
                f"key {key!r:.100} is legal, and its page was refused",
            )
            check(sut.has(key), "ID-6", f"{shown} exists looks elsewhere")
            check(sut.get([key]) != [None], "ID-6", f"{shown} get looks elsewhere")
        for key in keys:
            sut.expect_own([key], rule="ID-5")

    @covers("ID-5", levels=Level.IDENTITY)
    def test_keys_stay_inside(self, context: CaseContext) -> None:
        """Keys that climb directories leave no trace outside of the store's own."""
        sut = context.storage(pools={PoolName.KV: GuardedPool(pages=256)})
        for key in KEYS:
            # Whether it is stored is another case's question.
            sut.set([key])
        outside = _outside(context)
        for path in Path("/tmp").glob(ESCAPED):
            # In nobody's way, the next run's included.
            path.unlink()
        check(
            not outside,
            "ID-5",
            f"keys that climb directories wrote outside the store: {sorted(outside)}",
        )

    @covers("ID-6", levels=Level.IDENTITY)
    def test_the_prefix_names_no_page(self, context: CaseContext) -> None:
        """A page that was set with prefix keys is found without them and with others."""
        sut, keys, prefix = context.storage(), context.keys(3), context.keys(4)
        told = [
            HiCacheStorageExtraInfo(prefix_keys=prefix[:2], request_id="one"),
            HiCacheStorageExtraInfo(prefix_keys=prefix[2:]),
            None,
        ]
        sut.info = told[0]
        sut.store(keys)
        for info in told:
            sut.info = info
            shown = list(info.prefix_keys or ()) if info else []
            found = sut.get(keys).count(None), sut.exists(keys).kv_hit_pages
            check(
                found == (0, 3),
                "ID-6",
                f"3 pages were set with the prefix keys {list(map(short, prefix[:2]))}; with "
                f"{list(map(short, shown))} a get misses {found[0]} and exists finds {found[1]}",
            )

    @covers("ID-6", "GET-1", levels=Level.IDENTITY)
    def test_the_next_call_has_the_same_list_and_tensor(self, context: CaseContext) -> None:
        """A caller writes keys and indices where those of the call before were."""
        sut, keys = context.storage(), context.keys(16)
        memory, chain = sut.memories[PoolName.KV], keys[:4]
        slots = slots_of(range(4), memory.page_size)
        transfers = [PoolTransfer(PoolName.KV, slots, keys=chain)]

        def turn(start: int) -> list[int]:
            pages = context.random.sample(range(memory.pages), 4)
            chain[:] = keys[start : start + 4]
            slots.copy_(slots_of(pages, memory.page_size))
            return pages

        for start in range(0, len(keys), 4):
            pages = turn(start)
            sut.fill(PageGroup(chain), pages)
            answer = sut.call("batch_set_v2", partial(sut.storage.batch_set_v2, transfers))
            check(answer == {PoolName.KV: [True] * 4}, "SET-1", f"a set answered {answer}")
        chain[:] = context.keys(4)
        sut.expect(keys, rule="ID-6")
        for start in range(0, len(keys), 4):
            pages = turn(start)
            for number in range(2):
                memory.fill(pages, canary(number, memory.page_bytes))
                answer = sut.call("batch_get_v2", partial(sut.storage.batch_get_v2, transfers))
                found = [
                    content if ok else None
                    for content, ok in zip(memory.read_all(pages), answer[PoolName.KV], strict=True)
                ]
                sut.compare(chain, found, rule="ID-6")

    @covers("ID-6", levels=Level.IDENTITY)
    def test_calls_leave_their_arguments_alone(self, context: CaseContext) -> None:
        """Keys and indices are what they were, so that a caller can pass them to the next call."""
        sut, keys = context.storage(), context.keys(3)
        [transfer] = sut.transfers([PageGroup(keys)], [[4, 9, 2]])
        indices = transfer.host_indices
        assert indices is not None
        slots, chain, prefix = indices.clone(), list(keys), context.keys(2)
        info = HiCacheStorageExtraInfo(prefix_keys=list(prefix))
        for name, ask in (
            ("batch_set_v2", lambda: sut.storage.batch_set_v2([transfer], info)),
            ("batch_exists_v2", lambda: sut.storage.batch_exists_v2(chain, None, info)),
            ("batch_get_v2", lambda: sut.storage.batch_get_v2([transfer], info)),
        ):
            sut.call(name, ask)
            for argument, now, then in (
                ("keys", str(transfer.keys), str(keys)),
                ("host_indices", str(indices), str(slots)),
                ("host_indices", str(id(transfer.host_indices)), str(id(indices))),
                ("keys", str(chain), str(keys)),
                ("prefix_keys", str(info.prefix_keys), str(prefix)),
            ):
                check(
                    now == then,
                    "ID-6",
                    f"{name} changed the caller's {argument} from {then:.100} to {now:.100}",
                )


def _long_keys(context: CaseContext) -> list[str]:
    """Keys as long as is legal, which differ in one place each."""
    max_keys = min(MAX_KEY_BYTES, context.capabilities.max_key_bytes)
    half = max_keys // 2
    return [
        "k" * max_keys,
        "k" * (max_keys - 1),
        "k" * (max_keys - 1) + "K",
        "K" + "k" * (max_keys - 1),
        "k" * half + "/" + "k" * (max_keys - half - 1),
        "\u00e9" * half,
        "\U0001f600" * (max_keys // 4),
    ]


def _outside(context: CaseContext) -> set[str]:
    """List the files around the directory that `{tmp}` stands for.

    Those named like a key that climbed one level are among them.
    """
    own = {context.tmp, *context.tmp.parents}
    around = {
        entry
        for level in own
        if level != context.tmp and level.is_relative_to(context.sandbox)
        for entry in level.iterdir()
    }
    stray = (around - own).union(context.tmp.glob("escape*"), Path("/tmp").glob(ESCAPED))
    return {
        str(path.relative_to(context.sandbox) if path.is_relative_to(context.sandbox) else path)
        for path in stray
    }
