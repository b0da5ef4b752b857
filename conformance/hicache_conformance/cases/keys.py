"""Keys are opaque: any legal text names its own page, and no text leads out of the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache_conformance.harness.page_patterns import short
from hicache_conformance.harness.pools import GuardedPool
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Violation
from hicache_storage.spec import MAX_KEY_BYTES, PoolName

if TYPE_CHECKING:
    from hicache_conformance.fixtures.context import Lab

KEYS: Final = (
    "", " ", ".", "..", "...", "/", "//", "a", "A", "a ", " a", "a.", "a/", "/a", "./a", "a/.", "a//b", "a/b", "a-b", "a_b", "a b",
    "a\\b", "a:b", "a|b", "a?b", "a*b", "a%2Fb", "a%2fb", "a+b", "a\nb", "a\tb", "a\rb", "a\x01b", "a\x7fb", "a'b", 'a"b', "a;b",
    "a$b", "$HOME", "~", "~root", "-rf", "--", "{tmp}", "%s", "%00", "\\0", "null", "None", "CON", "nul.txt", "kv", "kv/a", "mamba/a",
    "../escape", "../../escape", "../../../../escape", "a/../../../../escape", "/tmp/hicache-conformance-escape", "..\\escape",
    "key", "KEY", "Key", "\u00e9", "e\u0301", "\u00c9", "\u212b", "\u00c5", "\u03c3", "\u03c2", "\u0131", "i", "I", "\u0130",
    "\u65e5\u672c", "\U0001f600", "\u200b", "\u202e", "\ufeff", "\ufffe", "\ud7ff", "\ue000", "\U0010ffff", "\u0661", "1", "\uff11",
)  # fmt: skip
"""Texts that file names, URLs, shells, file systems and other people's naming schemes treat in some way of their own."""


ESCAPED: Final = "hicache-conformance-escape*"
"""What the one of them that is an absolute path leaves behind where it leads out."""


class KeyCases:
    """ID-5 and ID-6."""

    @covers("ID-5", levels=[Level.IDENTITY])
    def test_every_key_is_its_own(self, lab: Lab) -> None:
        """All odd keys in one namespace, each with its own bytes."""
        subject = lab.storage(pools={PoolName.KV: GuardedPool(pages=256)})
        keys = [*KEYS, *_long_keys(lab)]
        for key in keys:
            if subject.set([key]) != [True]:
                raise Violation("ID-5", f"key {key!r:.100} is legal, and its page was refused")
        for index, (key, content) in enumerate(zip(keys, subject.get(keys), strict=True)):
            wrong = "was stored (True), and a get answers False" if content is None else subject.explain(key, content)
            if wrong:
                raise Violation("ID-5", f"page {index} key {key!r:.100} {wrong}")

    @covers("ID-5", levels=[Level.IDENTITY])
    def test_a_key_is_no_other(self, lab: Lab) -> None:
        """With half of the odd keys stored, each of the others is a miss."""
        subject = lab.storage(pools={PoolName.KV: GuardedPool(pages=256)})
        keys = [*KEYS, *_long_keys(lab)]
        lab.random.shuffle(keys)
        half = len(keys) // 2
        subject.store(keys[:half])
        subject.expect_missing(keys[half:], rule="ID-5", why="was never set")

    @covers("ID-5", levels=[Level.IDENTITY])
    def test_keys_stay_inside(self, lab: Lab) -> None:
        """Keys that climb directories leave no trace outside of the store's own."""
        subject = lab.storage(pools={PoolName.KV: GuardedPool(pages=256)})
        for key in KEYS:
            # Whether it is stored is another case's question.
            subject.set([key])
        outside = _outside(lab)
        for path in Path("/tmp").glob(ESCAPED):
            # In nobody's way, the next run's included.
            path.unlink()
        if outside:
            raise Violation("ID-5", f"keys that climb directories wrote outside the store: {sorted(outside)}")

    @covers("ID-6", levels=[Level.IDENTITY])
    def test_three_calls_one_name(self, lab: Lab) -> None:
        """For each odd key: absent for exists and get, stored by set, there for exists and get, and still a no-op to set."""
        subject = lab.storage()
        for key in [*KEYS, *_long_keys(lab)]:
            shown = f"key {key!r:.100}"
            if subject.has(key) or subject.get([key]) != [None]:
                raise Violation("ID-6", f"{shown} was never set, and exists or get finds a page")
            if subject.set([key]) != [True]:
                raise Violation("ID-6", f"{shown} was refused by a set")
            if not subject.has(key):
                raise Violation("ID-6", f"{shown} was set, and exists looks elsewhere")
            content = subject.get([key])[0]
            wrong = "get looks elsewhere" if content is None else subject.explain(key, content)
            if wrong:
                raise Violation("ID-6", f"{shown} was set: {wrong}")

    @covers("ID-6", levels=[Level.IDENTITY])
    def test_neither_batch_nor_history_matters(self, lab: Lab) -> None:
        """A page is found alone, in a batch, and by a chain that begins elsewhere."""
        subject, keys = lab.storage(), lab.keys(16)
        subject.store(keys)
        subject.expect(keys)
        for index in lab.random.sample(range(16), 6):
            subject.expect([keys[index]], rule="ID-6")
            if not subject.has(keys[index]) or subject.exists(keys[index:]).kv_hit_pages != 16 - index:
                raise Violation("ID-6", f"key {short(keys[index])} was set in a batch, and is not found by itself")


def _long_keys(lab: Lab) -> list[str]:
    """Keys as long as is legal, which differ in one place each."""
    longest = min(MAX_KEY_BYTES, lab.capabilities.max_key_bytes)
    half = longest // 2
    return [
        "k" * longest,
        "k" * (longest - 1),
        "k" * (longest - 1) + "K",
        "K" + "k" * (longest - 1),
        "k" * half + "/" + "k" * (longest - half - 1),
        "\u00e9" * half,
        "\U0001f600" * (longest // 4),
    ]


def _outside(lab: Lab) -> set[str]:
    """What lies around the directory that `{tmp}` stands for, and what in it is named like a key that climbed one level."""
    own = {lab.tmp, *lab.tmp.parents}
    around = {entry for level in own if level != lab.tmp and level.is_relative_to(lab.sandbox) for entry in level.iterdir()}
    stray = (around - own).union(lab.tmp.glob("escape*"), Path("/tmp").glob(ESCAPED))
    return {str(path.relative_to(lab.sandbox) if path.is_relative_to(lab.sandbox) else path) for path in stray}
