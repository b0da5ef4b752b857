"""Samples of the level budget."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from drivers_networked import ACROSS
from mutants_faults import SERVER
from sample_driver import SampleDriver

if TYPE_CHECKING:
    from hicache_storage.spec import Capabilities

_CASE_CLASSES = {
    "EX-10": ("Budget",),
    "BU-1": ("Budget",),
    "BU-2": ("Staging",),
    "OB-2": ("Metrics",),
}

_ONE_QUESTION = "test_one_question_for_all_pools"


def _costly(name: str, rule: str, expect_message: str, *cases: str) -> SampleDriver:
    return SampleDriver(
        breaks=(rule,),
        expect_message=expect_message,
        case_classes=_CASE_CLASSES[rule],
        cases=cases,
        target=f"drivers_budget:{name}",
    )


def _waiting(expect_message: str = "", capabilities: Capabilities = ACROSS) -> SampleDriver:
    return SampleDriver(
        breaks=("EX-10",) if expect_message else (),
        expect_message=expect_message,
        case_classes=("Budget",),
        cases=("test_one_round_trip[network]", "test_many_keys"),
        config="drivers_networked:NetworkedConfig",
        trial_config={"port": "{port:pages}"},
        trial_services=(SERVER,),
        capabilities=capabilities,
    )


def _requesting(in_flight: int, expect_message: str = "") -> SampleDriver:
    return _waiting(expect_message, replace(ACROSS, requests_in_flight=in_flight))


SAMPLES = {
    "AsksForEachPool": _costly(
        "AsksForEachPool", "EX-10", "called objects_exist 3 times", _ONE_QUESTION
    ),
    "AsksForEachKey": _costly(
        "AsksForEachKey", "EX-10", "called objects_exist 384 times", _ONE_QUESTION
    ),
    "AsksTheServerForEachPool": _waiting("waited 3 times for the server"),
    "OneRequestAPage": _requesting(32),
    "OneRequestInFlight": _requesting(
        32, "waited 384 times for the server with 32 requests in flight, must be 12 at most"
    ),
    "DeclaresFewInFlight": _requesting(4, "waited 96 times for the server with 4"),
    "AsksTwiceForEachPage": _requesting(32, "made 768 requests, must be 384 at most"),
    "Pipelines": _waiting(),
    "WaitsForEachPacket": _waiting("waited 24 times for the server, must be 1 at most"),
    "ChokesOnManyKeys": _costly(
        "ChokesOnManyKeys", "EX-10", "answered 0 and [], must be 40 and [20, 40]"
    ),
    "LooksThroughLists": _costly(
        "LooksThroughLists", "EX-10", "an exists of 250000 keys would take some"
    ),
    "ReadsPageByPage": _costly("ReadsPageByPage", "BU-1", "read_objects 384 times"),
    "WritesPageByPage": _costly("WritesPageByPage", "BU-1", "write_objects 384 times"),
    "StagesReads": _costly("StagesReads", "BU-2", "a get of 128 pages took memory for"),
    "StagesInMappings": _costly("StagesInMappings", "BU-2", "a get of 128 pages took memory for"),
    "JoinsComponents": _costly("JoinsComponents", "BU-2", "a set of 128 pages took memory for"),
    "SerialisesMetrics": _costly("SerialisesMetrics", "OB-2", "metrics add"),
    "HashesForMetrics": _costly(
        "HashesForMetrics", "OB-2", "times as long with metrics as without"
    ),
    "CannotBeSwitchedOff": _costly(
        "CannotBeSwitchedOff", "OB-2", "metrics are off, and get_stats() counts"
    ),
    "HidesFaults": _costly(
        "HidesFaults", "OB-2", "with metrics off, get_stats() tells 0 faults after 0 and one more"
    ),
}
SAMPLES |= {
    name: replace(sample, target=f"drivers_budget:{name}")
    for name, sample in SAMPLES.items()
    if not sample.target
}
