"""Keys are opaque: any legal text names its own page, and no text leads out of the store."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache_conformance.harness.page_patterns import canary, short
from hicache_conformance.harness.pools import GuardedPool, slots_of
from hicache_conformance.harness.storage_under_test import PageGroup
from hicache_conformance.model.case import check, covers
from hicache_conformance.model.rules import Level
from hicache_storage.spec import MAX_KEY_BYTES, HiCacheStorageExtraInfo, PoolName, PoolTransfer

if TYPE_CHECKING:
    from hicache_conformance.fixtures.context import CaseContext

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
