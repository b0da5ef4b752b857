"""Target and findings of a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    """Who asks: what matters to one is nothing that another can mend."""

    ENGINE = "engine"
    AUTHOR = "author"
    OPERATOR = "operator"


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
    """Remedy; empty only if the status is ok."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorTarget:
    """Target of a diagnosis: a driver with its options, alone or as an engine has it, or the
    environment alone."""

    driver: str | None = None
    """None checks the environment, and all drivers without opening them."""
    engine: str = ""
    """Engine whose command line is checked too: `vllm` or `lmcache`."""
    command_line: list[str] = field(default_factory=list[str])
    """Words that start the engine."""
    options: dict[str, object] = field(default_factory=dict[str, object])
    """Options of the driver.

    Without any, a throwaway store is opened, if the driver's spec describes one.
    """
    deadline_seconds: float = 5.0
    """Deadline of each call into the driver, and of each connection."""
    throwaway: str = ""
    """Path of an empty directory, removed afterwards."""
    role: Role = Role.ENGINE


def ok(check: str, detail: str) -> Finding:
    """Report a check that has passed."""
    return Finding(check, Status.OK, detail)


def warn(check: str, detail: str, fix: str) -> Finding:
    """Report a defect that costs performance or safety, and its remedy."""
    return Finding(check, Status.WARN, detail, fix)


def fail(check: str, detail: str, fix: str) -> Finding:
    """Report a defect that prevents use, and its remedy."""
    return Finding(check, Status.FAIL, detail, fix)
