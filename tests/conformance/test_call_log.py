"""The log of a case's last calls."""

from __future__ import annotations

import pytest

from hicache_conformance.harness.call_log import CALLS, TEXT_LIMIT, CallLog
from hicache_conformance.harness.page_patterns import Page, PagePatterns
from hicache_storage.spec import PoolTransferResult, StorageIdentity


@pytest.mark.parametrize(
    ("about", "answer", "words"),
    [
        ([], None, "open() -> None"),
        ([("kv", ["a"])], {"kv": [True]}, "open(kv: 1 key 'a') -> kv: [True]"),
        (
            [("kv", ["a", "b", "c"]), ("mamba", ["a"])],
            {"kv": [True, False, True], "mamba": [False]},
            (
                "open(kv: 3 keys 'a', 'b', ...; mamba: 1 key 'a') -> "
                "kv: 2 of 3 True, the first False at 1; mamba: [False]"
            ),
        ),
        ([("kv", ["a"])], {"kv": [1, None, 3]}, "open(kv: 1 key 'a') -> kv: [1, None, 3]"),
        (
            [("kv", ["a"]), ("mamba", ())],
            PoolTransferResult(1, {"kv": 1, "mamba": 0}, [1]),
            "open(kv: 1 key 'a'; mamba) -> 1 pages; by pool {'kv': 1, 'mamba': 0}",
        ),
        ([], OSError("gone"), "open() -> raised OSError: gone"),
        ([], "x" * 1000, f"open() -> {repr('x' * 1000)[:TEXT_LIMIT]}"),
    ],
)
def test_a_call_is_a_line(about, answer, words):
    log = CallLog()
    log.add("open", about, answer)
    assert str(log) == words


def test_the_last_calls_are_kept():
    log = CallLog()
    for number in range(CALLS + 5):
        log.add(f"call{number}", [], None)
    lines = str(log).splitlines()
    assert (lines[0], lines[-1], len(lines)) == (
        "call5() -> None",
        f"call{CALLS + 4}() -> None",
        CALLS,
    )


IDENTITY = StorageIdentity(model="m", kv_dtype="bfloat16", page_size=2, layout="page_first")
PAGE = Page(IDENTITY, "kv", "a")


@pytest.mark.parametrize(("offset", "span"), [(0, "0 to 48"), (40, "16 to 64"), (95, "64 to 100")])
def test_the_bytes_around_the_first_difference(offset, span):
    patterns = PagePatterns()
    found = bytearray(patterns.render(PAGE, 100))
    found[offset] ^= 0xFF
    shown = patterns.difference(bytes(found), PAGE)
    assert shown.startswith(f"bytes {span} of 100, the first that differs is {offset}\n")
    start, end = map(int, span.split(" to "))
    assert bytes.fromhex(shown.splitlines()[2].split("found")[1]) == found[start:end]


def test_equal_bytes_have_no_difference():
    patterns = PagePatterns()
    assert patterns.difference(patterns.render(PAGE, 100), PAGE) == ""
