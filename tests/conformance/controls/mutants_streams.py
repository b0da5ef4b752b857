"""Controls of the level stream: engines that order too little or too much, drivers that use host pages too late."""

from __future__ import annotations

from control import Control

_WHERE = ("Stream",)


def _engine(name: str, *breaks: str, told: str = "") -> Control:
    return Control(
        breaks=breaks, told=told, where=_WHERE, target="control_objects:Objects", transfer_engine=f"control_streams:{name}"
    )


CONTROLS = {
    "StreamsInOrder": _engine("Engine"),
    "StagesInOrder": _engine("StagingEngine"),
    "GathersTooEarly": _engine("GathersTooEarly", "ST-1", told="nothing orders it behind 'kernel that writes layer 0"),
    "WritesBackTooEarly": _engine("WritesBackTooEarly", "ST-1", told="nothing orders it behind 'kernel that writes layer 0"),
    "LoadsOverKernels": _engine("LoadsOverKernels", "ST-1", told="nothing orders it behind 'kernel that "),
    "LoadsOverCopiesOut": _engine("LoadsOverCopiesOut", "ST-1", told="nothing orders it behind 'write-back of layer 0"),
    "OverwritesTooEarly": _engine("OverwritesTooEarly", "ST-1", told="'kernel that writes layer 0"),
    "AcknowledgesTooEarly": _engine("AcknowledgesTooEarly", "ST-1", told="'batch_set_v2' (host) reads bytes"),
    "SignalsAllLayersAtTheEnd": _engine("SignalsAllLayersAtTheEnd", "ST-2", told="has to wait for 'load of layer 1"),
    "SignalsOneLayerEarly": _engine("SignalsOneLayerEarly", "ST-2", told="nothing orders it behind 'load of layer 0"),
    "BlocksWhileLoading": _engine("BlocksWhileLoading", "ST-2", told="has to wait for 'load of layer 1"),
    "FreesUnderACopy": _engine("FreesUnderACopy", "ST-3", told="handed out before the copy is done"),
    "FreesUnderALoad": _engine("FreesUnderALoad", "ST-3", told="a load reads was freed"),
    "ReadsHostPagesLate": Control(
        breaks=("ST-1",), told="after the set had returned", where=_WHERE, target="control_pages:KeepsHostPages"
    ),
    "DeliversHostPagesLate": Control(
        breaks=("ST-1",), told="as a kernel sees it", where=_WHERE, target="control_streams:DeliversHostPagesLate"
    ),
}
