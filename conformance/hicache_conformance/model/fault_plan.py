"""Fault plans as data: the faults, the operations that they hit, and their duration."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FaultKind(StrEnum):
    """Kinds of faults."""

    DELAY = "delay"
    """The operation takes `seconds` longer."""
    HANG = "hang"
    """It does not come back before the injector is healed."""
    ERROR = "error"
    """It fails with the error named by `error`."""
    APPLIED = "error after it took effect"
    """It takes effect, and then fails: with the error named by `error`, or as a retransmitted
    request fails on NFS."""
    SHORT_READ = "short read"
    """Half of the bytes arrive."""
    SHORT_WRITE = "short write"
    """Half of the bytes are taken, and the writer is told so."""
    TORN_WRITE = "torn write"
    """Half of the bytes are taken, and the writer is told that all were."""
    BIT_FLIP = "bit flip"
    """One bit of the bytes differs, at the fraction `place` of them."""
    WRONG_KEY = "wrong key"
    """The bytes of another page of the same length arrive."""
    DUPLICATE = "duplicate"
    """The operation is done twice."""
    PARTIAL = "partial batch"
    """One page of a batch, at the fraction `place` of it, is not moved."""
    LOST_DESCRIPTOR = "lost descriptors"
    """Files that are open when the plan begins, and those whose operation is hit, answer ESTALE for
    good. Opened again, they are as they were."""
    CUT = "cut"
    """The connection is reset in the middle of the bytes."""
    HALF_OPEN = "half-open connection"
    """The connection stays open, and never carries a byte again, also after the injector is healed:
    as behind a router that has lost its state. New connections work."""
    REFUSE = "refuse"
    """Connections are refused, and those that are open are reset."""
    KILL = "killed server"
    """The servers are killed, and started again when the injector is healed."""
    STALE = "restart from a stale snapshot"
    """As a killed server, and what it finds on its disk is older than what it has acknowledged."""


UNTIMED = (FaultKind.KILL, FaultKind.STALE, FaultKind.REFUSE)
"""Kinds that act once, when the plan begins, whatever the operations; a server is back when the
injector is healed."""

DESTRUCTIVE = frozenset(
    {
        FaultKind.SHORT_READ,
        FaultKind.BIT_FLIP,
        FaultKind.WRONG_KEY,
        FaultKind.TORN_WRITE,
        FaultKind.STALE,
    }
)
"""Kinds after which a page that was acknowledged may be gone: its bytes were lost, or a right
driver took it for damaged."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that goes wrong."""

    kind: FaultKind
    operations: tuple[str, ...] = ()
    """Sorts of operations that it hits, as the injector names them; empty for all."""
    first: int = 0
    """Number of these operations that pass before it begins."""
    count: int = 0
    """Number of operations that it hits then; 0 for all until the injector is healed."""
    error: str = ""
    """Name of an `errno`."""
    seconds: float = 0.0
    place: float = 0.5
    member: str = ""
    """The one of several stores that it hits, by the name of its port; empty for all servers."""

    def __str__(self) -> str:
        if self.member:
            return f"{self.kind}: {self.member}"
        what = {
            FaultKind.ERROR: self.error,
            FaultKind.APPLIED: f"{self.error or 'an error'} after it took effect",
            FaultKind.DELAY: f"a delay of {self.seconds * 1000:.0f} ms",
        }.get(self.kind, str(self.kind))
        if self.kind in UNTIMED:
            return what
        where = " or ".join(self.operations) or "any operation"
        # In words, because the plan stands in messages of violations, which are read far from the
        # code.
        if not self.count:
            return f"{what} at {where}" + (
                f" from number {self.first + 1} on" if self.first else ""
            )
        return f"{what} at {where} number {self.first + 1}" + (
            f" to {self.first + self.count}" if self.count > 1 else ""
        )


class FaultPlan(msgspec.Struct, frozen=True):
    """Faults below one driver, all of one injector."""

    injector: str
    faults: tuple[Fault, ...]

    @property
    def destroys(self) -> bool:
        """Return whether an acknowledged page may be gone afterwards."""
        return any(fault.kind in DESTRUCTIVE for fault in self.faults)

    @property
    def hangs(self) -> bool:
        """Return whether operations may not come back before the injector is healed."""
        return any(fault.kind is FaultKind.HANG for fault in self.faults)

    def __str__(self) -> str:
        return f"{self.injector}: {'; '.join(map(str, self.faults)) or 'no fault'}"
