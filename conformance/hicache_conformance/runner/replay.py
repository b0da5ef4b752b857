"""Replay of failures from a `results.json`: the same driver, options, seed and faults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from hicache_conformance.model.fault_plan import FaultPlan  # noqa: TC001 - msgspec reads the annotations
from hicache_conformance.model.outcomes import Outcome, Replay, failing_cases
from hicache_conformance.model.rules import parse_levels
from hicache_conformance.model.settings import RunFile, Settings
from hicache_conformance.report.results import store_is_fresh
from hicache_conformance.runner.child_process import run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hicache_conformance.model.outcomes import CaseOutcome, OutcomeStream, RunResult


class DriverName(msgspec.Struct, frozen=True):
    """The driver that a file is about."""

    name: str


class RecordedCase(msgspec.Struct, frozen=True):
    """One case of a rule."""

    name: str
    outcome: Outcome
    broken_rule: str
    reason: str
    plans: tuple[FaultPlan, ...] = ()


class RecordedRule(msgspec.Struct, frozen=True):
    """One rule, and what became of its cases."""

    id: str
    cases: list[RecordedCase]

    def failing(self) -> list[RecordedCase]:
        """The cases that found it broken, or else those in which the run itself broke."""
        return failing_cases(self.id, self.cases)


class Record(msgspec.Struct, frozen=True):
    """One `results.json`, as far as it takes to run its cases again."""

    driver: DriverName
    seed: int
    profile: str
    levels: list[str]
    suite_version: str
    capabilities: dict[str, object]
    options: dict[str, object]
    rules: list[RecordedRule]
    replay: Replay | None = None
    page_bytes: int = 0

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read the file, or the one in a report's directory.

        Raises:
            OSError: there is none.
            ValueError: it is none, or cannot be repeated from.
        """
        file = path / "results.json" if path.is_dir() else path
        try:
            record = msgspec.json.decode(file.read_bytes(), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is no results.json of this suite: {error}") from error
        if record.replay is None:
            raise ValueError(
                f"{file} does not say how its run was begun; only runs of the storage suite can be "
                f"repeated"
            )
        return record

    @property
    def how(self) -> Replay:
        """Parameters of the recorded run."""
        assert self.replay is not None
        return self.replay

    @property
    def is_throwaway(self) -> bool:
        """Return whether the run had a store of its own, that is gone now."""
        return store_is_fresh(self.capabilities, self.options)

    def failing(self, rule: str, text: str = "") -> list[RecordedCase]:
        """The failing cases of a rule.

        Args:
            rule: its id.
            text: that the name of a case must contain.

        Raises:
            ValueError: there is none.
        """
        found = next((one for one in self.rules if one.id == rule), None)
        if found is None:
            raise ValueError(f"no rule {rule!r} in these results")
        failing = found.failing()
        if not failing:
            others = [
                f"{case.name} stopped at {case.broken_rule}"
                for case in found.cases
                if case.outcome is Outcome.FAIL
            ]
            raise ValueError(
                f"{rule} has no failing case in these results"
                + (f"; {', '.join(others)}" if others else "")
            )
        chosen = [case for case in failing if text in case.name]
        if not chosen:
            raise ValueError(
                f"no failing case of {rule} has {text!r} in its name; there are "
                f"{', '.join(c.name for c in failing)}"
            )
        return chosen

    def config(self, given: Mapping[str, str]) -> dict[str, str]:
        """The options of the run, with those that are given now in their place.

        Raises:
            ValueError: one that was hidden is not given again.
        """
        missing = [name for name in self.how.hidden if name not in given]
        if missing:
            again = " ".join(f"-c {name}=..." for name in missing)
            raise ValueError(
                f"the results do not show the secrets of {', '.join(missing)}; give them again: "
                f"{again}"
            )
        return {**self.how.options, **given}

    def check_services(self, given: Sequence[str] | None) -> None:
        """Make sure that the servers of the run are given: none is started from the file.

        Raises:
            ValueError: they are not.
        """
        if self.how.services and not given:
            raise ValueError(
                f"replay.services: nothing was run: the run had started "
                f"{', '.join(map(repr, self.how.services))}, and no command is taken from a file; "
                f"give yours with --start-server"
            )

    def settings(self, run_id: str | None) -> Settings:
        """Return the run's settings, with shrinking.

        Raises:
            ValueError: this suite does not know the levels.
        """
        return Settings(
            seed=self.seed,
            run=run_id or self.how.run,
            profile=self.profile,
            page_bytes=self.page_bytes,
            levels=parse_levels(",".join(self.levels)),
            # Whatever the profile says: a failure that is repeated is repeated to be understood.
            shrinks=True,
        )


@dataclass(frozen=True, slots=True)
class Repetition:
    """A case then and now."""

    then: RecordedCase
    now: CaseOutcome | None
    """None if it did not run."""

    @property
    def fails(self) -> bool:
        """Return whether it has failed again, of the driver or of the suite."""
        return self.now is not None and self.now.outcome in (Outcome.FAIL, Outcome.ERROR)

    @property
    def same_faults(self) -> bool:
        """Return whether the faults below the driver were those of the file, as far as it goes."""
        return self.now is not None and self.now.plans[: len(self.then.plans)] == self.then.plans

    @property
    def passes(self) -> bool:
        """Return whether it passes now, under the same faults as then."""
        return self.now is not None and self.now.outcome is Outcome.PASS and self.same_faults

    def __str__(self) -> str:
        if self.now is None:
            return "did not run: this suite has no such case for the driver"
        if self.fails:
            return "fails again"
        if self.now.outcome is not Outcome.PASS:
            return f"{self.now.outcome}: {self.now.reason}"
        return (
            "passes now"
            if self.passes
            else "passes, but this run put other faults below the driver than the file says"
        )


def repeat(
    record: Record,
    cases: Sequence[RecordedCase],
    config: dict[str, str],
    settings: Settings,
    services: list[str] | None = None,
    *,
    case_seconds: float,
    progress: Callable[[OutcomeStream], None],
) -> tuple[RunResult, list[Repetition]]:
    """Run recorded cases again, in a process of their own."""
    ran = run(
        RunFile(
            driver=record.driver.name,
            config=config,
            settings=settings,
            cases=[case.name for case in cases],
            services=services,
            interface=record.how.interface,
        ),
        case_seconds=case_seconds,
        progress=progress,
    )
    outcomes = {outcome.case: outcome for outcome in ran.stream.outcomes}
    running = ran.stream.running
    # A crash leaves no outcome. It is the failure that was looked for as often as not, so it counts
    # as one.
    if running is not None and not ran.stream.finished:
        what = (
            f"did not come back within {case_seconds:.0f} s"
            if ran.hung
            else "took the process down"
        )
        outcomes[running.case] = replace(
            running, outcome=Outcome.ERROR, reason=f"the driver {what}"
        )
    return ran, [Repetition(case, outcomes.get(case.name)) for case in cases]
