"""Lookups of keys and slots in the compatible part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_conformance.model.case import covers
from hicache_conformance.model.violation import Violation
from hicache_conformance.protocol.http_client import refused

if TYPE_CHECKING:
    from hicache_conformance.protocol.context import ServerContext

LARGE: Final = (128, 4096, 20_000)


class FindingCases:
    """`exists` and `get_page_indices`."""

    @covers("MD-FIND-1", "MD-CONF-1")
    def test_answers_are_aligned_with_keys(self, context: ServerContext) -> None:
        """Answers follow the keys through holes, duplicates and any order."""
        scope = context.scope(32)
        stored, missing = context.keys(context.number(2, 10)), context.keys(context.number(1, 10))
        where = dict(zip(stored, scope.store(stored), strict=True))
        for _ in range(5):
            # Drawn with repetitions: duplicates and holes in one request, where a compacted answer
            # goes wrong.
            asked = context.chance.choices([*stored, *missing], k=context.number(1, 30))
            if (flags := scope.exists(asked)) != [key in where for key in asked]:
                raise Violation(
                    "MD-FIND-1",
                    f"exists answers {flags}; expected {[key in where for key in asked]}",
                )
            if (indices := scope.indices(asked)) != [where.get(key) for key in asked]:
                raise Violation(
                    "MD-FIND-1",
                    f"get_page_indices answers {indices}; expected "
                    f"{[where.get(key) for key in asked]}",
                )

    @covers("MD-FIND-1")
    def test_no_keys_are_no_answer(self, context: ServerContext) -> None:
        """Empty lists are answered with empty lists."""
        scope = context.scope(4)
        answers = (scope.exists([]), scope.indices([]), scope.reserve([]))
        scope.confirm([], [])
        scope.delete([])
        if answers != ([], [], []):
            raise Violation("MD-FIND-1", f"no keys are answered with {answers}")

    @covers("MD-FIND-2")
    def test_keys_are_opaque(self, context: ServerContext) -> None:
        """Long keys, Unicode, slashes, case, spaces, controls: each is a key of its own."""
        stem = context.keys(1)[0][:24]
        keys = [
            stem,
            stem.upper(),
            f"{stem} ",
            f" {stem}",
            f"{stem}/",
            f"../{stem}",
            f"{stem}%2e",
            f"{stem}%2E",
            f"{stem}\u0000x",
            f"{stem}\u0000",
            f"{stem}\n",
            f"{stem}\t",
            f"{stem}'--",
            f'{stem}"',
            f"{stem}é",
            # The same letter as one code point and as two: a server that normalizes makes them one
            # key.
            f"{stem}e\u0301",
            f"{stem}ß",
            f"{stem}ss",
            f"{stem}一",
            f"{stem}😀",
            stem * 21,
            stem * 20 + "x" * 31,
            stem * 20 + "x" * 32,
            f"{stem}-k",
            f"{stem}-v",
            f"{stem}:kv",
            f"{stem},",
            f"{stem}?a=b#c",
            f"0{stem}",
        ]
        scope = context.scope(2 * len(keys))
        where = dict(zip(keys, scope.store(keys, rule="MD-FIND-2"), strict=True))
        if len(set(where.values())) != len(keys) or scope.indices(keys, rule="MD-FIND-2") != list(
            where.values()
        ):
            raise Violation(
                "MD-FIND-2",
                f"{len(keys)} keys have the slots {scope.indices(keys)}, stored were "
                f"{list(where.values())}",
            )
        gone = context.chance.sample(keys, 10)
        scope.delete(gone)
        for key, there in zip(keys, scope.exists(keys, rule="MD-FIND-2"), strict=True):
            if there == (key in gone):
                raise Violation(
                    "MD-FIND-2",
                    f"key {key!r} is {'there' if there else 'gone'} after {gone} were deleted",
                )

    @covers("MD-BIG-1")
    def test_large_batches_are_whole_or_refused(self, context: ServerContext) -> None:
        """Batches of 128, 4096 and 20,000 keys are answered in full, or refused with 413."""
        scope = context.scope(160)
        stored = context.keys(128)
        where = dict(zip(stored, scope.store(stored, rule="MD-BIG-1"), strict=True))
        for size in LARGE:
            asked = [*stored, *context.keys(size - len(stored))]
            # Stored keys all over the batch, so that an answer which is cut or split at a limit is
            # wrong somewhere.
            context.chance.shuffle(asked)
            reply = scope.post("exists", keys=asked)
            if reply.status != 200:
                if size == len(stored) or reply.status != 413:
                    raise Violation("MD-BIG-1", f"a batch of {size} keys: {reply}")
                refused(reply, "MD-BIG-1", f"a batch of {size} keys")
                continue
            if scope.exists(asked, "MD-BIG-1") != [key in where for key in asked]:
                raise Violation("MD-BIG-1", f"exists of {size} keys is wrong about some")
            if scope.indices(asked, "MD-BIG-1") != [where.get(key) for key in asked]:
                raise Violation("MD-BIG-1", f"get_page_indices of {size} keys is wrong about some")
