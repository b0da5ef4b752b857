"""A sample driver: a mutant, which has one planted bug, or a right driver."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hicache_storage.spec import Capabilities, Durability, Sharing

if TYPE_CHECKING:
    from collections.abc import Mapping

NOTHING = Capabilities(may_hang=False)
IN_PROCESS = Capabilities(
    sharing=Sharing.PROCESS, durability=Durability.REOPEN, deletes=True, clears=True, may_hang=False
)
PATH = {"path": "{tmp}/store"}


@dataclass(frozen=True, kw_only=True)
class SampleDriver:
    """A driver, and the expected result of the suite."""

    breaks: tuple[str, ...] = ()
    """Rules that must be reported as failed; empty for a right driver."""
    expect_message: str = ""
    """Part of what one of the messages must say."""
    case_classes: tuple[str, ...] = ()
    """Classes of cases to try it with, without their `Cases`; empty for the whole suite."""
    cases: tuple[str, ...] = ()
    """The only cases to try it with, with their parameters or without, where each costs its
    patience; empty for all of `case_classes`."""
    injectors: tuple[str, ...] = ()
    """The only injectors to try it on; empty for all that it has."""
    every_case: bool = False
    """Whether a mutant is tried further when it has been found."""
    known_bug: str = ""
    """The fault of a shipped driver that it repeats, such as D7; empty for one of our own."""
    target: str = ""
    """`"module:Class"`."""
    transfer_engine: str = ""
    """`"module:Class"` of the engine that the level stream copies with; empty for the SDK's."""
    config: str = "drivers_plain:PlainConfig"
    trial_config: Mapping[str, str] = field(default_factory=dict)
    capabilities: Capabilities = IN_PROCESS
    capacity_option: str = ""
    trial_services: tuple[tuple[str, ...], ...] = ()
    trial_members: tuple[str, ...] = ()


def in_module(module: str, samples: Mapping[str, SampleDriver]) -> dict[str, SampleDriver]:
    """Samples whose drivers are classes of that module, by their own names."""
    return {name: replace(sample, target=f"{module}:{name}") for name, sample in samples.items()}
