"""Controls of one storage in one process: core, pools and identity."""

from __future__ import annotations

from control import NOTHING, PATH, Control, in_module

_BASIC = (
    "Existence", "Reading", "Writing", "Damage", "HostPool", "Pool", "Key", "Identity", "Replication", "Clearing", "History",
    "Concurrency", "Misuse", "Stats",
)  # fmt: skip

CONTROLS = {
    "Plain": Control(target="control_plain:Plain", where=_BASIC),
    **in_module(
        "control_objects",
        {
            "Objects": Control(where=("Budget", "Staging", "Metrics")),
            "PromisesNothing": Control(capabilities=NOTHING, where=("Identity", "Clearing", "Sharing", "Durability")),
            "PromisesTooLittle": Control(capabilities=NOTHING, where=("Identity", "Sharing")),
            "LeavesChecksumsOut": Control(where=("Damage",)),
            "CountsNoBytes": Control(breaks=("OB-1",), told="bytes_read of pool 'kv' is 0, must be 1024", where=("Stats",)),
            "PromisesTooMuch": Control(breaks=("ID-2",), told="page 0 key", where=("Identity",)),
            "TrustsBytes": Control(breaks=("GET-5",), told="is damaged (flipped bit), and a get delivers it", where=("Damage",)),
            "HidesDamage": Control(
                field_fault="D10", breaks=("GET-7", "EX-9"), told="counted 0 damaged pages", where=("Damage",)
            ),
            "KeepsDamage": Control(field_fault="D10", breaks=("SET-3",), told="and a get answers False", where=("Damage",)),
        },
    ),
    **in_module(
        "control_pages",
        {
            "Misses": Control(field_fault="D11", breaks=("SET-1",), told="page 0 key"),
            "AlwaysTrue": Control(breaks=("GET-1", "EX-2"), told="was not written"),
            "Refuses": Control(breaks=("SET-1",), told="was refused"),
            "Raises": Control(field_fault="D10", breaks=("GET-1", "SET-7"), told="batch_get_v2 raised OSError: the disk is gone"),
            "ShortAnswers": Control(field_fault="D18", breaks=("GET-3",), told="keys were answered with", where=("Reading",)),
            "SwappedKeys": Control(field_fault="D2", breaks=("GET-1",), told="holds bytes of key", where=("Reading",)),
            "CompactsHoles": Control(field_fault="D7", breaks=("GET-1",), told="was not written at byte 0", where=("Reading",)),
            "DropsLastPage": Control(
                breaks=("SET-1",), told="was stored (True), and a get answers False", where=("Writing", "History")
            ),
            "TruncatesPages": Control(
                field_fault="D12", breaks=("GET-1",), told="was not written at byte 48", where=("Reading",)
            ),
            "LosesV": Control(
                field_fault="D13", breaks=("GET-1", "GET-4"), told="was not written at byte 96", where=("Reading",)
            ),
            "OverrunsPages": Control(field_fault="D18", breaks=("GET-2",), told="touched page", where=("Reading",)),
            "KeepsHostPages": Control(breaks=("SET-7",), told="SET-7: page 0 key", where=("Writing",)),
            "Rewrites": Control(breaks=("SET-3",), told="a set wrote it anew", where=("Writing",)),
            "SharesAScratchBuffer": Control(breaks=("CC-1",), told="holds bytes of key", where=("Concurrency",)),
            "FlattensPages": Control(field_fault="D11", breaks=("GET-8",), told="was not written", where=("HostPool",)),
            "RaisesWhatThePoolRaises": Control(
                breaks=("FT-1",),
                told="the host pool raised, and so did the call",
                where=("HostPool",),
                cases=("test_a_pool_that_fails",),
            ),
            "AllOrNothing": Control(
                breaks=("SET-6",), told="of a batch of existing, repeated and new pages was refused", where=("Writing",)
            ),
        },
    ),
    **in_module(
        "control_names",
        {
            "IgnoresIdentity": Control(
                field_fault="D8",
                breaks=("ID-1", "ID-3", "ID-4", "LC-4"),
                told="holds bytes written under",
                where=("Identity", "Replication", "Clearing"),
                every_case=True,
            ),
            "IgnoresDtype": Control(
                field_fault="D9", breaks=("ID-1",), told="kv_dtype 'bfloat16' (expected 'float16')", where=("Identity",)
            ),
            "IgnoresGeometry": Control(
                field_fault="D9", breaks=("ID-1",), told="was set from a pool of another geometry", where=("Identity",)
            ),
            "IgnoresPools": Control(breaks=("GET-1",), told="holds bytes of pool", where=("Pool",)),
            "IgnoresCase": Control(breaks=("ID-5",), told="holds bytes of key", where=("Key",)),
            "PastesKeys": Control(field_fault="D11", breaks=("ID-5",), told="holds bytes of key", where=("Key",)),
            "WritesByPath": Control(
                breaks=("ID-5",),
                told="wrote outside the store",
                config="control_plain:FileControlConfig",
                trial_config=PATH,
                where=("Key",),
            ),
            "EveryRankWrites": Control(breaks=("ID-3",), told="rank 1 is not the writer", where=("Replication",)),
            "OneStateForAllRanks": Control(breaks=("ID-3",), told="tp_rank", where=("Replication",)),
            "SetLooksElsewhere": Control(
                breaks=("ID-5", "ID-6"), told="was never set, and exists or get finds a page", where=("Key",)
            ),
        },
    ),
    **in_module(
        "control_policies",
        {
            "MinimumOfMaxima": Control(field_fault="D19", breaks=("EX-1",), told="must be", where=("Existence",)),
            "TrailingAsAll": Control(breaks=("EX-3",), told="EX-3: kv", where=("Existence",)),
            "GroupsDecide": Control(breaks=("EX-4",), told="(block_groups", where=("Existence",)),
            "NoList": Control(field_fault="D19", breaks=("EX-5",), told="restorable_prefix_pages is", where=("Existence",)),
            "OmitsPools": Control(breaks=("EX-6",), told="is None, must be 0", where=("Existence",)),
            "CountsGapsAway": Control(breaks=("EX-2",), told="kv .x: kv_hit_pages is 1, must be 0", where=("Existence",)),
            "RaisesOnUnknownPools": Control(breaks=("EX-7",), told="raised KeyError", where=("Existence",)),
            "FailsWithoutKeys": Control(field_fault="D13", breaks=("EX-8",), told="no keys", where=("Existence",)),
        },
    ),
    **in_module(
        "control_life",
        {
            "ConnectsAtOnce": Control(breaks=("LC-1",), told="connects (socket.connect)", where=("Lifecycle",)),
            "WritesAtOnce": Control(
                breaks=("LC-1",),
                told="wrote into its directory",
                config="control_plain:FileControlConfig",
                trial_config=PATH,
                where=("Lifecycle",),
            ),
            "LeavesAThread": Control(breaks=("LC-2",), told="thread 'left-behind'", where=("Lifecycle",)),
            "LeavesADescriptor": Control(breaks=("LC-2",), told="/dev/null", where=("Lifecycle",)),
            "KeepsPools": Control(breaks=("LC-2",), told="still holds its host pool", where=("Lifecycle",)),
            "WorksWhenClosed": Control(breaks=("LC-2",), told="after close() raised nothing", where=("Lifecycle",)),
            "InstallsAHandler": Control(field_fault="D17", breaks=("LC-3",), told="the handler of SIGUSR2", where=("Lifecycle",)),
            "NeedsTheMainThread": Control(field_fault="D17", breaks=("LC-3",), told="main thread", where=("Lifecycle",)),
            "Exits": Control(field_fault="D15", breaks=("LC-3",), told="tried to end the process", where=("Lifecycle",)),
            "ConfiguresLogging": Control(breaks=("LC-3",), told="the root logger's level", where=("Lifecycle",)),
            "DeclaresMoreWhenOpen": Control(
                breaks=("LC-6",), told="declares sharing=process", capabilities=NOTHING, where=("Lifecycle",)
            ),
            "ForgetsForks": Control(breaks=("LC-5",), told="got RuntimeError: bad file descriptor", where=("Lifecycle",)),
            "ClearsEverything": Control(
                field_fault="D13", breaks=("LC-4",), told="another's clear removed it", where=("Clearing",)
            ),
            "ClearsStrangersFiles": Control(
                field_fault="D11",
                breaks=("LC-4",),
                told="a file of somebody else",
                config="control_plain:FileControlConfig",
                trial_config=PATH,
                where=("Clearing",),
            ),
        },
    ),
    **in_module(
        "control_misuse",
        {
            "SwallowsMisuse": Control(breaks=("FT-2",), told="raised nothing", where=("Misuse",)),
            "ForeignErrors": Control(
                field_fault="D18", breaks=("FT-2",), told="raised KeyError, which is no HiCacheError", where=("Misuse",)
            ),
            "WritesBeforeItChecks": Control(field_fault="D5", breaks=("FT-2",), told="before it raised", where=("Misuse",)),
            "CountsMisuse": Control(
                breaks=("FT-2",),
                told="and a get answers False",
                where=("Misuse",),
                cases=("test_misuse_is_no_fault_of_the_store",),
            ),
            "LogsMisses": Control(breaks=("GET-6",), told="logged WARNING", where=("Reading",)),
        },
    ),
}
