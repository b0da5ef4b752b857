"""Samples of the level stream.

Engines that order too little or too much, drivers that use host pages too late.
"""

from __future__ import annotations

from sample_driver import SampleDriver

_CASE_CLASSES = ("Stream",)


def _engine(name: str, *breaks: str, expect_message: str = "") -> SampleDriver:
    return SampleDriver(
        breaks=breaks,
        expect_message=expect_message,
        case_classes=_CASE_CLASSES,
        target="drivers_objects:Objects",
        transfer_engine=f"drivers_streams:{name}",
    )


SAMPLES = {
    "StreamsInOrder": _engine("Engine"),
    "StagesInOrder": _engine("StagingEngine"),
    "GathersTooEarly": _engine(
        "GathersTooEarly",
        "ST-1",
        expect_message="nothing orders it behind 'kernel that writes layer 0",
    ),
    "WritesBackTooEarly": _engine(
        "WritesBackTooEarly",
        "ST-1",
        expect_message="nothing orders it behind 'kernel that writes layer 0",
    ),
    "LoadsOverKernels": _engine(
        "LoadsOverKernels", "ST-1", expect_message="nothing orders it behind 'kernel that "
    ),
    "LoadsOverCopiesOut": _engine(
        "LoadsOverCopiesOut",
        "ST-1",
        expect_message="nothing orders it behind 'write-back of ",
    ),
    "OverwritesTooEarly": _engine(
        "OverwritesTooEarly", "ST-1", expect_message="'kernel that writes layer 0"
    ),
    "AcknowledgesTooEarly": _engine(
        "AcknowledgesTooEarly", "ST-1", expect_message="'batch_set_v2' (host) reads bytes"
    ),
    "SignalsAllLayersAtTheEnd": _engine(
        "SignalsAllLayersAtTheEnd", "ST-2", expect_message="has to wait for 'load of layer 1"
    ),
    "SignalsOneLayerEarly": _engine(
        "SignalsOneLayerEarly", "ST-2", expect_message="nothing orders it behind 'load of layer 0"
    ),
    "BlocksWhileLoading": _engine(
        "BlocksWhileLoading", "ST-2", expect_message="has to wait for 'load of layer 1"
    ),
    "FreesUnderACopy": _engine(
        "FreesUnderACopy", "ST-3", expect_message="handed out before the copy is done"
    ),
    "FreesUnderALoad": _engine("FreesUnderALoad", "ST-3", expect_message="a load reads was freed"),
    "ReadsHostPagesLate": SampleDriver(
        breaks=("ST-1",),
        expect_message="after the set had returned",
        case_classes=_CASE_CLASSES,
        target="drivers_pages:KeepsHostPages",
    ),
    "DeliversHostPagesLate": SampleDriver(
        breaks=("ST-1",),
        expect_message="as a kernel sees it",
        case_classes=_CASE_CLASSES,
        target="drivers_streams:DeliversHostPagesLate",
    ),
}
