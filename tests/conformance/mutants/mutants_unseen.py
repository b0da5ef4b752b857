"""Samples that a run of the suite did not see once, and all shapes of a wrong answer."""

from __future__ import annotations

from sample_driver import SampleDriver, in_module

SAMPLES = in_module(
    "drivers_unseen",
    {
        "TwoHalves": SampleDriver(
            breaks=("GET-1",),
            expect_message="read while it was set",
            case_classes=("Concurrency",),
        ),
        "FindsBeforeItStores": SampleDriver(
            breaks=("ID-6",),
            expect_message="said to exist",
            case_classes=("Concurrency",),
        ),
        "KeepsTheCallersKeys": SampleDriver(
            breaks=("ID-6",),
            expect_message="answers False",
            case_classes=("Key",),
        ),
        "CachesIndices": SampleDriver(
            breaks=("GET-1",),
            expect_message="page",
            case_classes=("Key",),
        ),
        "SkipsCopiesItHasMade": SampleDriver(
            breaks=("GET-1",),
            expect_message="page",
            case_classes=("Key",),
        ),
        "NeedsLists": SampleDriver(
            breaks=("EX-2",),
            expect_message="AttributeError",
            case_classes=("Existence",),
        ),
        "ClearsEqualPages": SampleDriver(
            breaks=("LC-4",),
            expect_message="of equal bytes",
            case_classes=("Clearing",),
        ),
        "ClearsTwice": SampleDriver(
            breaks=("LC-4",),
            expect_message="after a clear had returned",
            case_classes=("Clearing",),
        ),
        **{
            f"{method}{shape}": SampleDriver(
                breaks=(rule,),
                expect_message="" if method == "BatchPresent" else "answered",
                case_classes=(case_class,),
            )
            for method, rule, case_class in (
                ("Read", "GET-3", "Reading"),
                ("Write", "GET-3", "Reading"),
                ("Delete", "SET-1", "Writing"),
                ("BatchPresent", "EX-11", "Existence"),
            )
            for shape in ("OneValue", "Shorter", "Numbers", "Generators")
        },
    },
)
