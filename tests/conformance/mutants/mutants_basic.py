"""Samples of one storage in one process: core, pools and identity."""

from __future__ import annotations

from sample_driver import NOTHING, PATH, SampleDriver, in_module

_BASIC = (
    "Existence",
    "Reading",
    "Writing",
    "CorruptObject",
    "HostPool",
    "Pool",
    "Key",
    "Identity",
    "Replication",
    "Clearing",
    "History",
    "Concurrency",
    "Misuse",
    "Stats",
)

SAMPLES = {
    "Plain": SampleDriver(target="drivers_plain:Plain", case_classes=_BASIC),
    **in_module(
        "drivers_objects",
        {
            "Objects": SampleDriver(case_classes=("Budget", "Staging", "Metrics")),
            "PromisesNothing": SampleDriver(
                capabilities=NOTHING,
                case_classes=("Identity", "Clearing", "Sharing", "Durability", "Shard"),
            ),
            "PromisesTooLittle": SampleDriver(
                capabilities=NOTHING, case_classes=("Identity", "Sharing")
            ),
            "LeavesChecksumsOut": SampleDriver(case_classes=("CorruptObject",)),
            "CountsNoBytes": SampleDriver(
                breaks=("OB-1",),
                expect_message="bytes_read of pool 'kv' is 0, must be 1024",
                case_classes=("Stats",),
            ),
            "PromisesTooMuch": SampleDriver(
                breaks=("ID-2",), expect_message="page 0 key", case_classes=("Identity",)
            ),
            "TrustsBytes": SampleDriver(
                breaks=("GET-5",),
                expect_message="is damaged (flipped bit), and a get delivers it",
                case_classes=("CorruptObject",),
            ),
            "HidesDamage": SampleDriver(
                known_bug="D10",
                breaks=("GET-7", "EX-9"),
                expect_message="counted 0 damaged pages",
                case_classes=("CorruptObject",),
            ),
            "KeepsDamage": SampleDriver(
                known_bug="D10",
                breaks=("SET-3",),
                expect_message="and a get answers False",
                case_classes=("CorruptObject",),
            ),
        },
    ),
    **in_module(
        "drivers_pages",
        {
            "Misses": SampleDriver(known_bug="D11", breaks=("SET-1",), expect_message="page 0 key"),
            "AlwaysTrue": SampleDriver(breaks=("GET-1", "EX-2"), expect_message="was not written"),
            "Refuses": SampleDriver(breaks=("SET-1",), expect_message="was refused"),
            "Raises": SampleDriver(
                known_bug="D10",
                breaks=("GET-1", "SET-7"),
                expect_message="batch_get_v2 raised OSError: the disk is gone",
            ),
            "ShortAnswers": SampleDriver(
                known_bug="D18",
                breaks=("GET-3",),
                expect_message="keys were answered with",
                case_classes=("Reading",),
            ),
            "SwappedKeys": SampleDriver(
                known_bug="D2",
                breaks=("GET-1",),
                expect_message="holds bytes of key",
                case_classes=("Reading",),
            ),
            "CompactsHoles": SampleDriver(
                known_bug="D7",
                breaks=("GET-1",),
                expect_message="was not written at byte 0",
                case_classes=("Reading",),
            ),
            "DropsLastPage": SampleDriver(
                breaks=("SET-1",),
                expect_message="was stored (True), and a get answers False",
                case_classes=("Writing", "History"),
            ),
            "TruncatesPages": SampleDriver(
                known_bug="D12",
                breaks=("GET-1",),
                expect_message="was not written at byte 48",
                case_classes=("Reading",),
            ),
            "LosesV": SampleDriver(
                known_bug="D13",
                breaks=("GET-1", "GET-4"),
                expect_message="was not written at byte 96",
                case_classes=("Reading",),
            ),
            "OverrunsPages": SampleDriver(
                known_bug="D18",
                breaks=("GET-2",),
                expect_message="touched page",
                case_classes=("Reading",),
            ),
            "KeepsHostPages": SampleDriver(
                breaks=("SET-7",), expect_message="SET-7: page 0 key", case_classes=("Writing",)
            ),
            "Rewrites": SampleDriver(
                breaks=("SET-3",), expect_message="a set wrote it anew", case_classes=("Writing",)
            ),
            "SharesAScratchBuffer": SampleDriver(
                breaks=("CC-1",), expect_message="holds bytes of key", case_classes=("Concurrency",)
            ),
            "FlattensPages": SampleDriver(
                known_bug="D11",
                breaks=("GET-8",),
                expect_message="was not written",
                case_classes=("HostPool",),
            ),
            "RaisesWhatThePoolRaises": SampleDriver(
                breaks=("FT-1",),
                expect_message="the host pool raised, and so did the call",
                case_classes=("HostPool",),
                cases=("test_a_pool_that_fails",),
            ),
            "AllOrNothing": SampleDriver(
                breaks=("SET-6",),
                expect_message="of a batch of existing, repeated and new pages was refused",
                case_classes=("Writing",),
            ),
        },
    ),
    **in_module(
        "drivers_names",
        {
            "IgnoresIdentity": SampleDriver(
                known_bug="D8",
                breaks=("ID-1", "ID-3", "ID-4", "LC-4"),
                expect_message="holds bytes written under",
                case_classes=("Identity", "Replication", "Clearing"),
                every_case=True,
            ),
            "IgnoresDtype": SampleDriver(
                known_bug="D9",
                breaks=("ID-1",),
                expect_message="kv_dtype 'bfloat16' (expected 'float16')",
                case_classes=("Identity",),
            ),
            "IgnoresDtypeAndDeniesPages": SampleDriver(
                breaks=("ID-1",),
                expect_message="was set under another identity",
                case_classes=("Identity",),
            ),
            "IgnoresGeometry": SampleDriver(
                known_bug="D9",
                breaks=("ID-1",),
                expect_message="was set from a pool of another geometry",
                case_classes=("Identity",),
            ),
            "IgnoresPools": SampleDriver(
                breaks=("GET-1",), expect_message="holds bytes of pool", case_classes=("Pool",)
            ),
            "IgnoresCase": SampleDriver(
                breaks=("ID-5",), expect_message="holds bytes of key", case_classes=("Key",)
            ),
            "PastesKeys": SampleDriver(
                known_bug="D11",
                breaks=("ID-5",),
                expect_message="holds bytes of key",
                case_classes=("Key",),
            ),
            "WritesByPath": SampleDriver(
                breaks=("ID-5",),
                expect_message="wrote outside the store",
                config="drivers_plain:FileControlConfig",
                trial_config=PATH,
                case_classes=("Key",),
            ),
            "EveryRankWrites": SampleDriver(
                breaks=("ID-3",),
                expect_message="rank 1 is not the writer",
                case_classes=("Replication",),
            ),
            "OneStateForAllRanks": SampleDriver(
                breaks=("ID-3",), expect_message="tp_rank", case_classes=("Replication",)
            ),
            "SetLooksElsewhere": SampleDriver(
                breaks=("ID-5", "ID-6"),
                expect_message="was never set, and exists or get finds a page",
                case_classes=("Key",),
            ),
        },
    ),
    **in_module(
        "drivers_policies",
        {
            "MinimumOfMaxima": SampleDriver(
                known_bug="D19",
                breaks=("EX-1",),
                expect_message="must be",
                case_classes=("Existence",),
            ),
            "TrailingAsAll": SampleDriver(
                breaks=("EX-3",), expect_message="EX-3: kv", case_classes=("Existence",)
            ),
            "GroupsDecide": SampleDriver(
                breaks=("EX-4",), expect_message="(block_groups", case_classes=("Existence",)
            ),
            "NoList": SampleDriver(
                known_bug="D19",
                breaks=("EX-5",),
                expect_message="restorable_prefix_pages is",
                case_classes=("Existence",),
            ),
            "OmitsPools": SampleDriver(
                breaks=("EX-6",), expect_message="is None, must be 0", case_classes=("Existence",)
            ),
            "CountsGapsAway": SampleDriver(
                breaks=("EX-2",),
                expect_message="kv .x: kv_hit_pages is 1, must be 0",
                case_classes=("Existence",),
            ),
            "RaisesOnUnknownPools": SampleDriver(
                breaks=("EX-7",), expect_message="raised KeyError", case_classes=("Existence",)
            ),
            "FailsWithoutKeys": SampleDriver(
                known_bug="D13",
                breaks=("EX-8",),
                expect_message="no keys",
                case_classes=("Existence",),
            ),
        },
    ),
    **in_module(
        "drivers_life",
        {
            "ConnectsAtOnce": SampleDriver(
                breaks=("LC-1",),
                expect_message="connects (socket.connect)",
                case_classes=("Lifecycle",),
            ),
            "WritesAtOnce": SampleDriver(
                breaks=("LC-1",),
                expect_message="wrote into its directory",
                config="drivers_plain:FileControlConfig",
                trial_config=PATH,
                case_classes=("Lifecycle",),
            ),
            "LeavesAThread": SampleDriver(
                breaks=("LC-2",), expect_message="thread 'left-behind'", case_classes=("Lifecycle",)
            ),
            "LeavesADescriptor": SampleDriver(
                breaks=("LC-2",), expect_message="/dev/null", case_classes=("Lifecycle",)
            ),
            "KeepsPools": SampleDriver(
                breaks=("LC-2",),
                expect_message="still holds its host pool",
                case_classes=("Lifecycle",),
            ),
            "WorksWhenClosed": SampleDriver(
                breaks=("LC-2",),
                expect_message="after close() raised nothing",
                case_classes=("Lifecycle",),
            ),
            "InstallsAHandler": SampleDriver(
                known_bug="D17",
                breaks=("LC-3",),
                expect_message="the handler of SIGUSR2",
                case_classes=("Lifecycle",),
            ),
            "NeedsTheMainThread": SampleDriver(
                known_bug="D17",
                breaks=("LC-3",),
                expect_message="main thread",
                case_classes=("Lifecycle",),
            ),
            "Exits": SampleDriver(
                known_bug="D15",
                breaks=("LC-3",),
                expect_message="tried to end the process",
                case_classes=("Lifecycle",),
            ),
            "ConfiguresLogging": SampleDriver(
                breaks=("LC-3",),
                expect_message="the root logger's level",
                case_classes=("Lifecycle",),
            ),
            "DeclaresMoreWhenOpen": SampleDriver(
                breaks=("LC-6",),
                expect_message="declares sharing=process",
                capabilities=NOTHING,
                case_classes=("Lifecycle",),
            ),
            "ForgetsForks": SampleDriver(
                breaks=("LC-5",),
                expect_message="got RuntimeError: bad file descriptor",
                case_classes=("Lifecycle",),
            ),
            "ClearsEverything": SampleDriver(
                known_bug="D13",
                breaks=("LC-4",),
                expect_message="another's clear removed it",
                case_classes=("Clearing",),
            ),
            "ClearsStrangersFiles": SampleDriver(
                known_bug="D11",
                breaks=("LC-4",),
                expect_message="a file of somebody else",
                config="drivers_plain:FileControlConfig",
                trial_config=PATH,
                case_classes=("Clearing",),
            ),
        },
    ),
    **in_module(
        "drivers_misuse",
        {
            "SwallowsMisuse": SampleDriver(
                breaks=("FT-2",), expect_message="raised nothing", case_classes=("Misuse",)
            ),
            "ForeignErrors": SampleDriver(
                known_bug="D18",
                breaks=("FT-2",),
                expect_message="raised KeyError, which is no HiCacheError",
                case_classes=("Misuse",),
            ),
            "WritesBeforeItChecks": SampleDriver(
                known_bug="D5",
                breaks=("FT-2",),
                expect_message="before it raised",
                case_classes=("Misuse",),
            ),
            "CountsMisuse": SampleDriver(
                breaks=("FT-2",),
                expect_message="and a get answers False",
                case_classes=("Misuse",),
                cases=("test_misuse_is_no_fault_of_the_store",),
            ),
            "LogsMisses": SampleDriver(
                breaks=("GET-6",), expect_message="logged WARNING", case_classes=("Reading",)
            ),
        },
    ),
}
