"""Samples that keep their pages on several servers, one of which is killed, stopped or cut off."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivers_members import SPREAD, VOLATILE
from sample_driver import SampleDriver

if TYPE_CHECKING:
    from hicache_storage.spec import Capabilities

_NAMES = ("a", "b", "c")
_CASE = "test_one_of_several_stores"


def _member(
    name: str, *breaks: str, capabilities: Capabilities = SPREAD, **fields: Any
) -> tuple[str, SampleDriver]:
    server = (sys.executable, "-P", str(Path(__file__).with_name("drivers_server.py")))
    logs = capabilities is SPREAD
    return name, SampleDriver(
        breaks=breaks,
        target=f"drivers_members:{name}",
        config="drivers_members:SpreadConfig",
        trial_config={"ports": ",".join(f"{{port:{port}}}" for port in _NAMES)},
        trial_services=tuple(
            (*server, f"{{port:{port}}}", *([f"{{tmp}}/{port}.log"] if logs else []))
            for port in _NAMES
        ),
        trial_members=_NAMES,
        capabilities=capabilities,
        case_classes=("Member",),
        **fields,
    )


SAMPLES = dict(
    [
        _member("Spread"),
        _member("FillsUp", capabilities=VOLATILE, cases=(f"{_CASE}[killed]",)),
        _member(
            "OneServerFailsAll",
            "FT-8",
            expect_message="gets have missed it",
            cases=(f"{_CASE}[cut-off]",),
        ),
        _member(
            "OneServerHasAllThreads",
            "FT-8",
            expect_message="(members: hang: ",
            cases=(f"{_CASE}[stopped]",),
        ),
        _member(
            "HoldsNamesToTheEnd",
            "FT-8",
            expect_message="(members: hang: ",
            cases=(f"{_CASE}[stopped]",),
        ),
        _member(
            "TakesListedForStored",
            "SET-1",
            expect_message="a get answers False when all stores are there again",
            cases=(f"{_CASE}[killed]",),
            capabilities=VOLATILE,
        ),
    ]
)
