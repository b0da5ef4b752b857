"""What becomes of cases and rules, and the file that a run streams its outcomes to.

The file has one JSON object a line: a header, the number of cases, a start and an outcome for each case, a footer. A
driver that takes the process down leaves a file without a footer, whose last start says which case it was.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TextIO


class Outcome(StrEnum):
    """What became of a case or of a rule. They are never merged."""

    PASS = "pass"
    FAIL = "fail"
    NOT_DECLARED = "not declared"
    """The rule needs a capability that the driver does not declare."""
    UNTESTED = "untested"
    """Nobody found out."""
    ERROR = "error"
    """The suite itself broke."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOutcome:
    """What became of one case."""

    case: str
    """Name of the test, with its parameters."""
    rules: tuple[str, ...]
    levels: tuple[str, ...]
    outcome: Outcome
    reason: str = ""
    """One line: what was wrong, what is not declared, why it is untested."""
    detail: str = ""
    """All there is to say about a failure: the history that led to it, the traceback of an error."""
    broken_rule: str = ""
    """The rule that a failure is about."""
    seconds: float = 0.0
    passes_undeclared: bool = False
    """The capability is not declared and the case passed all the same."""

    @property
    def function(self) -> str:
        """Name of the test without its parameters."""
        return self.case.partition("[")[0]


@dataclass(slots=True, kw_only=True)
class Header:
    """What is known before the first case."""

    driver: str
    seed: int
    profile: str
    levels: list[str]
    spec_version: str
    suite_version: str
    distribution: str = ""
    """`name version` of the distribution that registers the driver."""
    capabilities: dict[str, Any] = field(default_factory=dict[str, Any])
    undeclared: list[str] = field(default_factory=list[str])
    """What rules of the contract need and the driver does not declare."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Redacted."""
    environment: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(slots=True)
class Stream:
    """All that a run has written down so far."""

    header: Header | None = None
    cases: int = 0
    """Number of cases that were collected."""
    outcomes: list[CaseOutcome] = field(default_factory=list[CaseOutcome])
    running: CaseOutcome | None = None
    """The case that has begun and not ended."""
    broken: str = ""
    """Why no case could be run at all."""
    finished: bool = False

    def feed(self, line: str) -> None:
        """Take one line of the file."""
        record = json.loads(line)
        kind = record.pop("kind")
        if kind == "header":
            self.header = Header(**record)
        elif kind == "collected":
            self.cases = record["cases"]
        elif kind == "start":
            self.running = _case_outcome(record)
        elif kind == "outcome":
            self.outcomes.append(_case_outcome(record))
            self.running = None
        elif kind == "broken":
            self.broken = record["reason"]
        elif kind == "footer":
            self.finished = True

    @property
    def undeclared(self) -> list[str]:
        """What rules need and the driver does not declare."""
        return self.header.undeclared if self.header else []

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a whole file; an incomplete last line is what a crash leaves, and is ignored."""
        stream = cls()
        for line in path.read_text("utf-8").splitlines(keepends=True) if path.exists() else ():
            if line.endswith("\n"):
                stream.feed(line)
        return stream


class StreamWriter:
    """Writes the file; every line is on its way to the disk before the next case begins."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w", encoding="utf-8")

    def header(self, header: Header) -> None:
        """Say what is known before the first case."""
        self._write("header", **asdict(header))

    def collected(self, cases: int) -> None:
        """Say how many cases there are."""
        self._write("collected", cases=cases)

    def start(self, case: str, rules: tuple[str, ...], levels: tuple[str, ...]) -> None:
        """A case begins."""
        blank = CaseOutcome(case=case, rules=rules, levels=levels, outcome=Outcome.UNTESTED)
        self._write("start", **asdict(blank))

    def outcome(self, outcome: CaseOutcome) -> None:
        """A case has ended."""
        self._write("outcome", **asdict(outcome))

    def broken(self, reason: str) -> None:
        """No case can be run."""
        self._write("broken", reason=reason)

    def footer(self) -> None:
        """The run has come to its end."""
        self._write("footer")
        self._file.close()

    def _write(self, kind: str, **record: object) -> None:
        self._file.write(json.dumps({"kind": kind, **record}) + "\n")
        self._file.flush()


def _case_outcome(record: dict[str, Any]) -> CaseOutcome:
    return CaseOutcome(
        **{
            **record,
            "rules": tuple(record["rules"]),
            "levels": tuple(record["levels"]),
            "outcome": Outcome(record["outcome"]),
        }
    )
