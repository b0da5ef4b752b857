"""`mutant`: a right driver with one planted fault, given as patches of its steps."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any, Self

from hicache_storage.spec import Capabilities, Durability, Sharing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NOTHING = Capabilities(may_hang=False)
IN_PROCESS = Capabilities(
    sharing=Sharing.PROCESS, durability=Durability.REOPEN, deletes=True, clears=True, may_hang=False
)
SHORT_NAMES = {
    "init": "__init__",
    "get": "batch_get_v2",
    "set": "batch_set_v2",
    "exists": "batch_exists_v2",
    "register": "register_mem_host_pool_v2",
    "stats": "get_stats",
}
"""Names of the contract's methods in patches."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """A right driver, and how it is registered."""

    driver: type
    config: str
    trial_config: Mapping[str, str] = field(default_factory=dict)
    capabilities: Capabilities = IN_PROCESS
    capacity_option: str = ""
    trial_services: tuple[tuple[str, ...], ...] = ()
    trial_members: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A mutant or a right driver, and the expected result of the suite."""

    name: str
    base: Base
    driver: type
    breaks: tuple[str, ...] = ()
    """Rules that must be reported as failed; empty for a right driver."""
    message: str = ""
    """Part of what one of the messages must say."""
    where: tuple[str, ...] = ()
    """Cases to try it with, or classes of cases without their `Cases`; empty for the whole
    suite."""
    injectors: tuple[str, ...] = ()
    """The only injectors to try it on; empty for all that it has."""
    every_case: bool = False
    """Whether a mutant is tried further when it has been found."""

    @property
    def capabilities(self) -> Capabilities:
        promised: Capabilities = getattr(self.driver, "registered", self.base.capabilities)
        return promised


SAMPLES: dict[str, Sample] = {}
"""By name."""


class _Notes:
    """Room for what a fault remembers: of one storage, and of all storages of the process."""

    seen: set[Any]
    memo: dict[Any, Any]
    shared: dict[Any, Any]

    def __new__(cls, *_: object, **__: object) -> Self:
        self = super().__new__(cls)
        self.seen, self.memo = set(), {}
        return self


def mutant(
    header: str,
    message: str,
    *,
    base: Base,
    breaks: str = "",
    where: str = "",
    injectors: tuple[str, ...] = (),
    every_case: bool = False,
    **patches: Any,
) -> None:
    """Register a driver whose steps are patched.

    The header has the rules that it breaks, its name, and the cases or classes of cases to try it
    with. A patch that is a function is called with the right step, the storage and the arguments
    of the step; another value takes the place of an attribute.
    """
    rules, name, cases = re.fullmatch(r"((?:[A-Z]+-\d+ )*)(\w+)(.*)", header).groups()
    assert name not in SAMPLES, name
    driver = type(name, (_Notes, base.driver), {"__module__": __name__, "shared": {}})
    for short, patch in patches.items():
        step = SHORT_NAMES.get(short, short)
        is_step = isinstance(patch, FunctionType)
        setattr(driver, step, _patched(driver, step, patch) if is_step else patch)
    SAMPLES[name] = Sample(
        name=name,
        base=base,
        driver=driver,
        breaks=tuple((breaks or rules).split()),
        message=message,
        where=tuple((where or cases).split()),
        injectors=injectors,
        every_case=every_case,
    )


def right(header: str, base: Base, **fields: Any) -> None:
    """Register a driver that the suite must not blame."""
    mutant(header, "", base=base, **fields)


def _patched(driver: type, step: str, patch: FunctionType) -> Callable[..., Any]:
    def patched(self: Any, *arguments: Any, **named: Any) -> Any:
        return patch(getattr(super(driver, self), step), self, *arguments, **named)

    patched.__name__ = step
    return patched


# Patches of many steps
# ------------------------------------------------------------------------------------------------


def always(value: Any) -> Callable[..., Any]:
    """The step does nothing, and answers with a value."""
    return lambda right, store, *arguments, **named: value


def after(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """The step's answer is changed."""
    return lambda right, store, *arguments, **named: change(right(*arguments, **named))


def instead(step: Callable[..., Any]) -> Callable[..., Any]:
    """Another function in the place of the step."""
    return lambda right, store, *arguments, **named: step(store, *arguments, **named)


def __getattr__(name: str) -> type:
    """The drivers, by which they are registered."""
    if name in SAMPLES:
        return SAMPLES[name].driver
    raise AttributeError(name)
