"""What is examined, and what is found."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """`fail`: it cannot work. `warn`: it can, with the loss that the finding names."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the diagnosis."""

    check: str
    status: Status
    detail: str
    fix: str = ""
    """What to do about it; empty only where the status is ok."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """What is examined."""

    driver: str | None = None
    """None examines what all drivers have in common, and all drivers without opening them."""
    options: dict[str, str] = field(default_factory=dict[str, str])
    """As they would be given to the driver; with none, a throwaway store is opened, where the driver knows how."""
    deadline_seconds: float = 5.0
    """Of each call into the driver, and of each connection."""
    pinned_bytes: int | None = None
    """Host memory that the engine is going to lock."""
    throwaway: str = ""
    """An empty directory, removed afterwards."""


def ok(check: str, detail: str) -> Finding:
    """All is well."""
    return Finding(check, Status.OK, detail)


def warn(check: str, detail: str, fix: str) -> Finding:
    """It works, and not as well as it could."""
    return Finding(check, Status.WARN, detail, fix)


def fail(check: str, detail: str, fix: str) -> Finding:
    """It does not work."""
    return Finding(check, Status.FAIL, detail, fix)
