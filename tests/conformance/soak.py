"""The long test of the suite itself: every mutant on many seeds, every right driver on more.

`make soak` runs it.

Every verdict is a line in the record, so that an interrupted soak goes on where it stopped. A
verdict counts for the state of the sources that it depends on: the suite, the SDK, and the driver
with what it is made of. With another state it is sought again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]
MUTANTS_HOME = Path(__file__).with_name("mutants")
EVERY = (
    "conformance",
    "hicache_storage",
    *(
        f"tests/conformance/mutants/{name}.py"
        for name in ("sample_driver", "drivers_plugin", "drivers_selection", "drivers_suite")
    ),
)
"""What the verdicts about all drivers depend on; those about a sample depend on its modules as
well."""
OWN = (
    "backends/hicache_backends/file",
    "backends/hicache_backends/posix",
    "examples/hicache-memory-driver",
)
APART = tuple(
    ROOT / name
    for name in (
        "conformance/hicache_conformance/cli.py",
        "conformance/hicache_conformance/interfaces",
        "conformance/hicache_conformance/report",
        "conformance/hicache_conformance/runner/preflight.py",
        "conformance/hicache_conformance/runner/run.py",
        "conformance/hicache_conformance/runner/verify.py",
        "hicache_storage/cli",
        "hicache_storage/tools",
    )
)
"""What changes no verdict about a sample."""

sys.path[:0] = [str(MUTANTS_HOME), str(MUTANTS_HOME.parent)]
from conftest import Site
from drivers_plugin import SAMPLES

from hicache_conformance.model.rules import rules

SEED_SECONDS = 1800
DRIVERS = {
    "mutants": [name for name, sample in SAMPLES.items() if sample.breaks],
    "right": [name for name, sample in SAMPLES.items() if not sample.breaks],
    "own": ["file", "memory"],
}
"""By kind. Our own are tried with everything and have to be conformant; right samples with the part
that they are there for."""

PROFILE = "smoke"
HEAD = """\
# The suite's own long test

`make soak` plants faults into drivers and looks whether the suite finds each by the rule that is
meant for it, on every seed. It also runs drivers that are right, which the suite has to accept on
every seed. This page is its result.

Sources {sources}, profile {profile}, {cores} cores. A mutant is tried with the cases of the rules
that it breaks, until it is found by each of them. `D` and a number name a fault of a driver in the
field that it repeats.

- **{killed} of {mutants} mutants killed**, each on {mutant_seeds} seeds.
- **{accepted} of {right} right drivers accepted**, each on {right_seeds} seeds.
"""
"""Beginning of the page."""


@dataclass(frozen=True)
class Result:
    """What one seed said about one driver."""

    kind: str
    """A key of `DRIVERS`."""
    seed: int
    driver: str
    verdict: str
    failed: list[str]
    """Rules."""
    errors: list[str]
    """Cases in which the suite itself broke."""
    told: list[str] = field(default_factory=list)
    """What the failures said, one line each."""

    @property
    def is_as_meant(self) -> bool:
        """Return whether the mutant was found by its rules, or the right driver not blamed."""
        if self.errors:
            return False
        match self.kind:
            case "mutants":
                return set(SAMPLES[self.driver].breaks) <= set(self.failed)
            case "right":
                return not self.failed
            case _:
                return self.verdict == "conformant"


class Record:
    """The file of verdicts."""

    def __init__(self, path: Path, states: Mapping[str, str]) -> None:
        self._path = path
        self._states = states
        self._lock = threading.Lock()
        self._results: dict[tuple[str, int, str], Result] = {}
        # A last line without an end is what an interrupted soak was about to write.
        lines = (
            [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            if path.exists()
            else []
        )
        for line in lines:
            found = json.loads(line)
            result = Result(**found["result"])
            if found["state"] == states.get(result.driver):
                self._results[result.kind, result.seed, result.driver] = result
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines))

    @property
    def results(self) -> list[Result]:
        """In the order of their seeds."""
        return [self._results[place] for place in sorted(self._results)]

    def missing(self, kind: str, seed: int) -> list[str]:
        """Drivers of which there is no verdict with this seed."""
        return [name for name in DRIVERS[kind] if (kind, seed, name) not in self._results]

    def add(self, results: list[Result]) -> None:
        """Take some."""
        lines = [
            json.dumps({"state": self._states[result.driver], "result": asdict(result)}) + "\n"
            for result in results
        ]
        with self._lock, self._path.open("a") as file:
            file.write("".join(lines))
            self._results.update(
                ((result.kind, result.seed, result.driver), result) for result in results
            )


def run_seed(site: Site, kind: str, seed: int, drivers: list[str]) -> list[Result]:
    """One pytest over some drivers of a kind."""
    with tempfile.TemporaryDirectory(prefix="hicache-soak-") as directory:
        ran = site.samples(kind, seed, Path(directory), SEED_SECONDS, drivers, PROFILE)
        reports = sorted(Path(directory, "report").rglob("results.json"))
        results = {
            result.driver: result
            for result in (_result(kind, seed, json.loads(path.read_text())) for path in reports)
        }
        missing = [name for name in drivers if name not in results]
        if missing:
            raise RuntimeError(
                f"seed {seed} of the {kind} left no report of "
                f"{', '.join(missing)}:\n{ran.output[-3000:]}"
            )
        return [results[name] for name in drivers]


def _result(kind: str, seed: int, report: dict) -> Result:
    cases = {case["name"]: case for rule in report["rules"] for case in rule["cases"]}.values()
    return Result(
        kind=kind,
        seed=seed,
        driver=report["driver"]["name"],
        verdict=report["verdict"],
        failed=[rule["id"] for rule in report["rules"] if rule["outcome"] == "fail"],
        errors=[
            f"{case['name']}: {case['reason']}" for case in cases if case["outcome"] == "error"
        ],
        told=[f"{case['name']}: {case['reason']}" for case in cases if case["outcome"] == "fail"],
    )


def document(results: list[Result], states: Mapping[str, str]) -> str:
    """The page of the docs."""
    mutants, right = (
        _by_driver(results, "mutants"),
        {**_by_driver(results, "own"), **_by_driver(results, "right")},
    )
    killed = sum(all(result.is_as_meant for result in found) for found in mutants.values())
    accepted = sum(all(result.is_as_meant for result in found) for found in right.values())
    seeds = {
        kind: len({result.seed for result in results if result.kind == kind}) for kind in DRIVERS
    }
    head = HEAD.format(
        sources=_joined(states),
        profile=PROFILE,
        cores=os.cpu_count(),
        killed=killed,
        mutants=len(mutants),
        mutant_seeds=seeds["mutants"],
        accepted=accepted,
        right=len(right),
        right_seeds=min(seeds["right"], seeds["own"]),
    )
    lines = [
        head,
        "| mutant | found by | fault of the field | seeds |",
        "| --- | --- | --- | --- |",
        *(
            f"| {name} | {', '.join(_found_by(found))} | {SAMPLES[name].known_bug} | "
            f"{_score(found)} |"
            for name, found in mutants.items()
        ),
        "",
        "| right driver | tried with | accepted on seeds |",
        "| --- | --- | --- |",
        *(f"| {name} | {_areas(name)} | {_score(found)} |" for name, found in right.items()),
    ]
    bad = [result for result in results if not result.is_as_meant]
    if bad:
        lines += ["", "Not as meant:", ""]
        lines += [
            f"- {result.driver}, seed {result.seed}: "
            f"{'; '.join(result.errors or result.told) or 'not found'}"
            for result in bad
        ]
    return "\n".join(lines) + "\n"


def _joined(states: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(states[name] for name in sorted(states)).encode()).hexdigest()[
        :12
    ]


def _by_driver(results: list[Result], kind: str) -> dict[str, list[Result]]:
    """In the order in which the samples are listed."""
    found: dict[str, list[Result]] = {name: [] for name in DRIVERS[kind]}
    for result in results:
        if result.kind == kind:
            found[result.driver].append(result)
    return {name: some for name, some in found.items() if some}


def _found_by(found: list[Result]) -> list[str]:
    """The rules that a mutant was seen to break on every seed, in the order of the contract."""
    return [rule for rule in rules() if all(rule in result.failed for result in found)]


def _areas(name: str) -> str:
    where = SAMPLES[name].case_classes if name in SAMPLES else ()
    return ", ".join(area.lower() for area in where) or "everything"


def _score(found: list[Result]) -> str:
    return f"{sum(result.is_as_meant for result in found)} of {len(found)}"


def state_of(driver: str) -> str:
    """Digest of everything that a verdict about this driver depends on."""
    sample = SAMPLES.get(driver)
    tops = [ROOT / top for top in (*EVERY, *(() if sample else OWN))]
    files = {
        path
        for top in tops
        for path in (top.rglob("*.*") if top.is_dir() else [top])
        if path.suffix in (".py", ".toml")
    }
    files = {path for path in files if not any(path.is_relative_to(part) for part in APART)}
    if sample:
        _add_modules(
            files,
            f"{sample.target} {sample.config} {sample.transfer_engine} {sample.trial_services}",
        )
    # Servers are started by commands that name this machine's paths.
    digest = hashlib.sha256(
        repr(sample).replace(sys.executable, "").replace(str(ROOT), "").encode()
    )
    for path in sorted(files):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _add_modules(files: set[Path], text: str) -> None:
    """The samples' modules that a text names, and those that they name."""
    for path in sorted(MUTANTS_HOME.glob("*.py")):
        if path not in files and re.search(rf"\b{path.stem}\b", text):
            files.add(path)
            _add_modules(files, path.read_text())


def main() -> None:
    """Run what is missing in the record, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutant-seeds", type=int, default=20)
    parser.add_argument("--right-seeds", type=int, default=30)
    parser.add_argument("--own-seeds", type=int, default=30)
    # Half of the time is spent waiting for what hangs.
    parser.add_argument("--jobs", type=int, default=3 * (os.cpu_count() or 1) // 2)
    parser.add_argument("--record", type=Path, default=ROOT / "out" / "soak.jsonl")
    parser.add_argument("--document", type=Path, default=ROOT / "out" / "soak.md")
    options = parser.parse_args()
    states = {name: state_of(name) for names in DRIVERS.values() for name in names}
    record = Record(options.record, states)
    counts = {
        "mutants": options.mutant_seeds,
        "right": options.right_seeds,
        "own": options.own_seeds,
    }
    wanted = [(kind, seed) for kind in DRIVERS for seed in range(counts[kind])]
    # All kinds side by side: a fault in the last of them is not seen only after an hour.
    wanted.sort(key=lambda job: job[1] / counts[job[0]])
    with (
        tempfile.TemporaryDirectory(prefix="hicache-site-") as directory,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        site = Site(Path(directory))

        def one(job: tuple[str, int]) -> None:
            drivers = record.missing(*job)
            try:
                results = run_seed(site, *job, drivers) if drivers else []
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"{job[0]} seed {job[1]}: {error}", flush=True)
                return
            record.add(results)
            bad = [result for result in results if not result.is_as_meant]
            if results:
                print(
                    f"{job[0]} seed {job[1]}: {len(results) - len(bad)} of {len(results)} as meant",
                    flush=True,
                )
            for result in bad:
                print(
                    f"  {result.driver}: "
                    f"{'; '.join(result.errors or result.told)[:1000] or 'not found'}",
                    flush=True,
                )

        list(pool.map(one, wanted))
    options.document.write_text(document(record.results, states))
    unfinished = [job for job in wanted if record.missing(*job)]
    sys.exit(bool(unfinished) or any(not result.is_as_meant for result in record.results))


if __name__ == "__main__":
    main()
