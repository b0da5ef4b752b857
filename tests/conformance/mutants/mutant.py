"""`mutant`: a right driver with one planted fault, given as patches of its steps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from hicache_storage.spec import Capabilities, Durability, Sharing

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
class Sample:
    """A mutant or a right driver, and the expected result of the suite."""

    name: str
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


SAMPLES = {}
"""By name."""


class _Notes:
    """Room for what a fault remembers: of one storage, and of all storages of the process."""

    seen: set[Any]
    memo: dict[Any, Any]
    shared: dict[Any, Any]

    def __new__(cls, *_, **__):
        self = super().__new__(cls)
        self.seen, self.memo = set(), {}
        return self


def mutant(
    header,
    message,
    *,
    base,
    breaks="",
    where="",
    injectors=(),
    every_case=False,
    **patches,
):
    """Register a driver whose steps are patched.

    The header has the rules that it breaks, its name, and the cases or classes of cases to try it
    with. A patch that is a function is called with the right step, the storage and the arguments
    of the step; another value takes the place of an attribute.
    """
    rules, name, cases = re.fullmatch(r"((?:[A-Z]+-\d+ )*)(\w+)(.*)", header).groups()
    assert name not in SAMPLES, name
    driver = type(name, (_Notes, base), {"__module__": __name__, "shared": {}})
    for short, patch in patches.items():
        step = SHORT_NAMES.get(short, short)
        is_step = isinstance(patch, FunctionType)
        setattr(driver, step, _patched(driver, step, patch) if is_step else patch)
    SAMPLES[name] = Sample(
        name=name,
        driver=driver,
        breaks=tuple((breaks or rules).split()),
        message=message,
        where=tuple((where or cases).split()),
        injectors=injectors,
        every_case=every_case,
    )


def right(header, base, **fields):
    """Register a driver that the suite must not blame."""
    mutant(header, "", base=base, **fields)


def _patched(driver, step, patch):
    def patched(self, *arguments, **named):
        return patch(getattr(super(driver, self), step), self, *arguments, **named)

    patched.__name__ = step
    return patched


# Patches of many steps
# ------------------------------------------------------------------------------------------------


def always(value):
    """The step does nothing, and answers with a value."""
    return lambda right, store, *arguments, **named: value


def after(change):
    """The step's answer is changed."""
    return lambda right, store, *arguments, **named: change(right(*arguments, **named))


def instead(step):
    """Another function in the place of the step."""
    return lambda right, store, *arguments, **named: step(store, *arguments, **named)


def works_as(change):
    """The storage works with another identity than it was given and tells."""

    def init(right, store, identity, config):
        store.memo["given"] = identity
        right(change(identity), config)

    return {"init": init, "identity": property(lambda store: store.memo["given"])}


def __getattr__(name):
    """The drivers, by which they are registered."""
    if name in SAMPLES:
        return SAMPLES[name].driver
    raise AttributeError(name)
