"""Samples of what drivers remember: of pages, lookups and removals."""

from __future__ import annotations

from sample_driver import SampleDriver, in_module

SAMPLES = in_module(
    "drivers_caches",
    {
        "ClearKeepsTheReadCache": SampleDriver(
            breaks=("LC-4",),
            expect_message="was cleared",
            case_classes=(
                "Clearing",
                "History",
            ),
        ),
        "DeleteKeepsTheReadCache": SampleDriver(
            breaks=("SET-1",),
            expect_message="was deleted",
            case_classes=("Writing",),
        ),
        "ReadCacheMissesOthersRemovals": SampleDriver(
            breaks=("SET-1", "LC-4"),
            expect_message="by another storage",
            case_classes=("Writing", "Clearing"),
        ),
        "ReadCacheIgnoresPools": SampleDriver(
            breaks=("GET-1",),
            expect_message="holds bytes of pool",
            case_classes=("Pool",),
        ),
        "ReadCacheIgnoresIdentity": SampleDriver(
            breaks=("ID-1",),
            expect_message="holds",
            case_classes=("Identity",),
        ),
        "DeleteKeepsTheLookupCache": SampleDriver(
            breaks=("SET-1",),
            expect_message="exists says",
            case_classes=("Writing",),
        ),
        "ClearKeepsTheLookupCache": SampleDriver(
            breaks=("LC-4",),
            expect_message="exists says",
            case_classes=("Clearing",),
        ),
        "LookupCacheIgnoresPools": SampleDriver(
            breaks=("EX-3",),
            expect_message="extra_pool_hit_pages",
            case_classes=("Existence",),
        ),
        "LookupCacheKeepsDamage": SampleDriver(
            breaks=("EX-9",),
            expect_message="goes on existing",
            case_classes=("CorruptObject",),
        ),
        "RemembersMisses": SampleDriver(
            breaks=("ID-2",),
            expect_message="get answers False",
            case_classes=("Identity",),
        ),
        "RemembersUnknownPools": SampleDriver(
            breaks=("EX-7",),
            expect_message="registered",
            case_classes=("Existence",),
        ),
        "HidesWhatOthersRepair": SampleDriver(
            breaks=("SET-3",),
            expect_message="repaired",
            case_classes=("CorruptObject",),
        ),
        "TrustsWhatItHasSet": SampleDriver(
            breaks=("SET-1",),
            expect_message="get answers False",
            case_classes=("Writing",),
        ),
        "RewritesOthersPages": SampleDriver(
            breaks=("SET-3",),
            expect_message="wrote it anew",
            case_classes=("Writing",),
        ),
        "RewritesSidePools": SampleDriver(
            breaks=("SET-3",),
            expect_message="wrote it anew",
            case_classes=("Writing",),
        ),
        "RewritesSinglePages": SampleDriver(
            breaks=("SET-3",),
            expect_message="wrote it anew",
            case_classes=("Writing",),
        ),
        "SharesEqualPages": SampleDriver(
            breaks=("SET-1",),
            expect_message="get answers False",
            case_classes=("Writing",),
        ),
        "SharesKVOnly": SampleDriver(
            breaks=("ID-2",),
            expect_message="of pool 'mamba' was stored (True)",
            case_classes=("Identity",),
        ),
        "ReopensKVOnly": SampleDriver(
            breaks=("ID-2",),
            expect_message="of pool 'mamba' was stored (True)",
            case_classes=("Identity",),
        ),
        "ReopeningUndoesDeletes": SampleDriver(
            breaks=("SET-1",),
            expect_message="was deleted",
            case_classes=("Writing",),
        ),
        "ReopeningUndoesClears": SampleDriver(
            breaks=("LC-4",),
            expect_message="was cleared",
            case_classes=("Clearing",),
        ),
        "ClearsOnce": SampleDriver(
            breaks=("LC-4",),
            expect_message="was cleared",
            case_classes=("Clearing",),
        ),
        "ClearsKVOnly": SampleDriver(
            breaks=("LC-4",),
            expect_message="was cleared",
            case_classes=("Clearing",),
        ),
    },
)
