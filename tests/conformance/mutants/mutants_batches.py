"""Samples of faults that show for some batches, keys, bytes or orders only."""

from __future__ import annotations

from sample_driver import SampleDriver, in_module

SAMPLES = in_module(
    "drivers_batches",
    {
        "ReadsSixtyFourPages": SampleDriver(
            breaks=("GET-1",),
            expect_message="was not written",
            case_classes=("Reading",),
        ),
        "WritesSixtyFourPages": SampleDriver(
            breaks=("SET-1",),
            expect_message="get answers False",
            case_classes=(
                "Reading",
                "Writing",
            ),
        ),
        "SkipsTheLastAdjoiningPage": SampleDriver(
            breaks=("GET-1",),
            expect_message="was not written",
            case_classes=("Reading",),
        ),
        "SortsDescendingPages": SampleDriver(
            breaks=("GET-1",),
            expect_message="holds bytes of key",
            case_classes=("Reading",),
        ),
        "ReadsThePlainTensor": SampleDriver(
            breaks=("GET-2",),
            expect_message="touched page",
            case_classes=("Reading",),
        ),
        "DividesItsIndices": SampleDriver(
            breaks=("ID-6",),
            expect_message="host_indices",
            case_classes=("Key",),
        ),
        "EmptiesItsKeys": SampleDriver(
            breaks=("ID-6",),
            expect_message="keys",
            case_classes=("Key",),
        ),
        "ScramblesItsSources": SampleDriver(
            breaks=("GET-2",),
            expect_message="changed host page",
            case_classes=("Writing",),
        ),
        "BlanksBehindMisses": SampleDriver(
            breaks=("GET-2",),
            expect_message="touched page",
            case_classes=("Reading",),
        ),
        "AnswersForTheFirstPool": SampleDriver(
            breaks=("GET-1",),
            expect_message="pool",
            case_classes=("Pool",),
        ),
        "KeepsTheFirstGeometry": SampleDriver(
            breaks=("ID-1",),
            expect_message="geometry",
            case_classes=("Identity",),
        ),
        "ZerosAreAHole": SampleDriver(
            breaks=("SET-1",),
            expect_message="a page of zeros was stored",
            case_classes=("Writing",),
        ),
        "StripsZeros": SampleDriver(
            breaks=("SET-1",),
            expect_message="a page of zeros was stored",
            case_classes=("Writing",),
        ),
        "EndsAtItsMark": SampleDriver(
            breaks=("SET-1",),
            expect_message="a page of the envelope's mark",
            case_classes=("Writing",),
        ),
        "NamesByCRC32": SampleDriver(
            breaks=("ID-5",),
            expect_message="holds bytes of key",
            case_classes=("Key",),
        ),
        "CutsKeys": SampleDriver(
            breaks=("ID-5",),
            expect_message="holds bytes of key",
            case_classes=("Key",),
        ),
        "NamesByPrefix": SampleDriver(
            breaks=("ID-6",),
            expect_message="prefix",
            case_classes=("Key",),
        ),
        "CachesFingerprints": SampleDriver(
            breaks=("ID-1",),
            expect_message="holds bytes written under",
            case_classes=("Identity",),
        ),
        "LooksUpByRank": SampleDriver(
            breaks=("ID-3",),
            expect_message="3 pages can be read, and kv_hit_pages is 0",
            case_classes=("Replication",),
        ),
        "VerifiesTheFirstPage": SampleDriver(
            breaks=("GET-5",),
            expect_message="is damaged",
            case_classes=("CorruptObject",),
        ),
        "VerifiesAllButTheLast": SampleDriver(
            breaks=("GET-5",),
            expect_message="is damaged",
            case_classes=("CorruptObject",),
        ),
        "VerifiesKVOnly": SampleDriver(
            breaks=("GET-5",),
            expect_message="is damaged",
            case_classes=("CorruptObject",),
        ),
        "ConnectsToSet": SampleDriver(
            cases=("test_any_call_may_be_the_first",),
            breaks=("LC-1",),
            expect_message="first call",
            case_classes=("Lifecycle",),
        ),
        "ClearsBeforeItConnects": SampleDriver(
            cases=("test_a_clear_may_be_the_first_call",),
            breaks=("LC-1",),
            expect_message="clear",
            case_classes=("Lifecycle",),
        ),
        "ClearsWhenClosed": SampleDriver(
            cases=("test_calls_after_close",),
            breaks=("LC-2",),
            expect_message="clear after close",
            case_classes=("Lifecycle",),
        ),
        "DeletesWhenClosed": SampleDriver(
            cases=("test_calls_after_close",),
            breaks=("LC-2",),
            expect_message="delete after close",
            case_classes=("Lifecycle",),
        ),
        "LeavesAProcess": SampleDriver(
            cases=("test_nothing_is_left_behind",),
            breaks=("LC-2",),
            expect_message="child process",
            case_classes=("Lifecycle",),
        ),
        "HandlesRareSignals": SampleDriver(
            cases=("test_the_process_is_left_alone",),
            breaks=("LC-3",),
            expect_message="SIGURG",
            case_classes=("Lifecycle",),
        ),
        "RegistersForOneThread": SampleDriver(
            cases=("test_many_threads",),
            breaks=("EX-2",),
            expect_message="exists does not find it",
            case_classes=("Concurrency",),
        ),
        "RegistersFromScratch": SampleDriver(
            cases=("test_pools_are_registered_during_calls",),
            breaks=("CC-1",),
            expect_message="registered",
            case_classes=("Concurrency",),
        ),
        "LocksInTheCallersOrder": SampleDriver(
            cases=("test_many_threads_and_pools",),
            breaks=("CC-1",),
            expect_message="raised StorageUnavailableError",
            case_classes=("Concurrency",),
        ),
        "BlanksWhatItDeletes": SampleDriver(
            cases=("test_many_threads_and_deletes",),
            breaks=("CC-1",),
            expect_message="zeros",
            case_classes=("Concurrency",),
        ),
        "NoTransfersRaise": SampleDriver(
            breaks=("GET-3",), expect_message="raised IndexError", case_classes=("Reading",)
        ),
        "BorrowsForSetsOnly": SampleDriver(
            breaks=("GET-3",), expect_message="borrows kv's indices", case_classes=("Pool",)
        ),
        "DeletesInAllPools": SampleDriver(
            breaks=("SET-1",), expect_message="of pool 'kv' was stored", case_classes=("Pool",)
        ),
        "DeletesFromKVOnly": SampleDriver(
            breaks=("SET-1",), expect_message="of pool 'mamba' was deleted", case_classes=("Pool",)
        ),
        "NoKeysDeleteEverything": SampleDriver(
            breaks=("SET-1",), expect_message="get answers False", case_classes=("Writing",)
        ),
        "NoPoolsClearEverything": SampleDriver(
            breaks=("LC-4",),
            expect_message="which has no pools",
            case_classes=("Clearing",),
        ),
    },
)
