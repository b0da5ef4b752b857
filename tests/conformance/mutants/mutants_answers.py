"""Samples of the form of answers, and of counters."""

from __future__ import annotations

from sample_driver import SampleDriver, in_module

SAMPLES = in_module(
    "drivers_answers",
    {
        "AnswersTuples": SampleDriver(
            breaks=("GET-3",),
            expect_message="answered with",
            case_classes=("Reading",),
        ),
        "AnswersNumpyBools": SampleDriver(
            breaks=("GET-3",),
            expect_message="answered with",
            case_classes=("Reading",),
        ),
        "AnswersNoneForMisses": SampleDriver(
            breaks=("GET-3",),
            expect_message="answered with",
            case_classes=("Reading",),
        ),
        "PadsAnswers": SampleDriver(
            breaks=("GET-3",),
            expect_message="answered with",
            case_classes=("Reading",),
        ),
        "OmitsPoolsWithoutKeys": SampleDriver(
            breaks=("GET-3",),
            expect_message="answered {}",
            case_classes=("Reading",),
        ),
        "OmitsPoolsOfMisses": SampleDriver(
            breaks=("GET-3",),
            expect_message="answered {}",
            case_classes=("Reading",),
        ),
        "AnswersForEveryPool": SampleDriver(
            breaks=("GET-3",),
            expect_message="answered",
            case_classes=("Reading",),
        ),
        "ReusesAnswers": SampleDriver(
            breaks=("GET-3",),
            expect_message="changed",
            case_classes=("Reading",),
        ),
        "OneAnswerForAllPools": SampleDriver(
            breaks=("GET-3",),
            expect_message="GET-3: page",
            case_classes=("Pool",),
        ),
        "DeleteAnswersNothing": SampleDriver(
            breaks=("SET-1",),
            expect_message="keys answered None",
            case_classes=("Writing",),
        ),
        "ReusesEndpoints": SampleDriver(
            breaks=("EX-5",),
            expect_message="changed",
            case_classes=("Existence",),
        ),
        "HitsAreFloats": SampleDriver(
            breaks=("EX-1",),
            expect_message="kv_hit_pages is",
            case_classes=("Existence",),
        ),
        "EndpointsAreAnIterator": SampleDriver(
            breaks=("EX-5",),
            expect_message="restorable_prefix_pages is",
            case_classes=("Existence",),
        ),
        "EndpointsAreATuple": SampleDriver(
            breaks=("EX-5",),
            expect_message="restorable_prefix_pages is",
            case_classes=("Existence",),
        ),
        "VerdictsAreNumpyNumbers": SampleDriver(
            breaks=("EX-6",),
            expect_message="extra_pool_hit_pages",
            case_classes=("Existence",),
        ),
        "ListsThirtyTwoEndpoints": SampleDriver(
            breaks=("EX-5",),
            expect_message="restorable_prefix_pages is",
            case_classes=("Existence",),
        ),
        "PresenceEndsAtAHole": SampleDriver(
            breaks=("EX-11",),
            expect_message="must be",
            case_classes=("Existence",),
        ),
        "PresenceOfEachOnce": SampleDriver(
            breaks=("EX-11",),
            expect_message="were answered with",
            case_classes=("Existence",),
        ),
        "PresenceInOrderOfKeys": SampleDriver(
            breaks=("EX-11",),
            expect_message="must be",
            case_classes=("Existence",),
        ),
        "PresenceOfKV": SampleDriver(
            breaks=("EX-11",),
            expect_message="'mamba'",
            case_classes=("Existence",),
        ),
        "PresenceIsASet": SampleDriver(
            breaks=("EX-11",),
            expect_message="were answered with",
            case_classes=("Existence",),
        ),
        "PresenceRemembersMisses": SampleDriver(
            breaks=("EX-11",),
            expect_message="must be",
            case_classes=("Existence",),
        ),
        "PresenceOfUnknownPoolsRaises": SampleDriver(
            breaks=("EX-11",),
            expect_message="raised KeyError",
            case_classes=("Existence",),
        ),
        "PresenceOfDamage": SampleDriver(
            breaks=("EX-9",),
            expect_message="goes on existing",
            case_classes=("CorruptObject",),
        ),
        "NoKeysRepeatTheLastHit": SampleDriver(
            breaks=("EX-8",),
            expect_message="kv_hit_pages is 2 for 0 keys",
            case_classes=("Existence",),
        ),
        "UnknownPoolsHideTheOthers": SampleDriver(
            breaks=("EX-6",),
            expect_message="unregistered",
            case_classes=("Existence",),
        ),
        "NeedsKV": SampleDriver(
            breaks=("EX-7",),
            expect_message="KeyError",
            case_classes=("Existence",),
        ),
        "CapsWindows": SampleDriver(
            breaks=("EX-3",),
            expect_message="must be",
            case_classes=("Existence",),
        ),
        "LooksUpSixtyFour": SampleDriver(
            breaks=("EX-2",),
            expect_message="must be",
            case_classes=("Existence",),
        ),
        "LendsItsCounters": SampleDriver(
            breaks=("OB-1",),
            expect_message="changed after it was taken",
            case_classes=("Stats",),
        ),
        "DrainsItsCounters": SampleDriver(
            breaks=("OB-1",),
            expect_message="pages_read",
            case_classes=("Stats",),
        ),
        "ForgetsCountersWhenClosed": SampleDriver(
            breaks=("OB-1",),
            expect_message="pages_written",
            case_classes=("Stats",),
        ),
        "CountsLookupsAsMisses": SampleDriver(
            breaks=("OB-1",),
            expect_message="pages_missed",
            case_classes=("Stats",),
        ),
        "CountsEverythingAsKV": SampleDriver(
            breaks=("OB-1",),
            expect_message="pages_read",
            case_classes=("Stats",),
        ),
        "CountsTransfersTwice": SampleDriver(
            breaks=("OB-1",),
            expect_message="pages_read",
            case_classes=("Stats",),
        ),
        "CountsDamageOncePerCall": SampleDriver(
            breaks=("GET-7",),
            expect_message="damaged pages",
            case_classes=("CorruptObject",),
        ),
    },
)
