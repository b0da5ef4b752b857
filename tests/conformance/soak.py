"""The long test of the suite itself: every mutant on many seeds, every right driver on more; `make soak` runs it.

Every finished seed is a line in the record, so that an interrupted soak goes on where it stopped. A record belongs to one
state of the sources; another state begins a new one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTROLS_HOME = Path(__file__).with_name("controls")
SOURCES = ("conformance", "hicache_storage", "backends", "tests/conformance/controls", "examples/hicache-memory-driver")

sys.path[:0] = [str(CONTROLS_HOME), str(CONTROLS_HOME.parent)]
from conftest import Site
from control_plugin import CONTROLS

import hicache_conformance

INI = Path(hicache_conformance.__file__).with_name("suite") / "pytest.ini"
SEED_SECONDS = 1800
CONFORMING = ("file", "memory")
"""Right drivers that have to be conformant; the others promise too little for that on purpose, or leave something out."""


@dataclass(frozen=True)
class Result:
    """What one seed said about one driver."""

    kind: str
    """`mutants` or `right`."""
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
        """Whether the mutant was found by the rules meant for it, or the right driver was not blamed."""
        if self.errors:
            return False
        if self.kind == "right":
            return not self.failed and (self.driver not in CONFORMING or self.verdict == "conformant")
        return set(CONTROLS[self.driver].breaks) <= set(self.failed)


class Record:
    """The file of finished seeds."""

    def __init__(self, path: Path, state: str) -> None:
        self._path, self._lock = path, threading.Lock()
        self.results: list[Result] = []
        lines = path.read_text().splitlines() if path.exists() else []
        if lines and json.loads(lines[0]) == {"state": state}:
            self.results = [Result(**json.loads(line)) for line in lines[1:]]
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"state": state}) + "\n")

    def done(self, kind: str) -> set[int]:
        return {result.seed for result in self.results if result.kind == kind}

    def add(self, results: list[Result]) -> None:
        with self._lock, self._path.open("a") as file:
            file.writelines(json.dumps(asdict(result)) + "\n" for result in results)
            self.results += results


def run_seed(site: Site, kind: str, seed: int) -> list[Result]:
    """One pytest over all drivers of a kind."""
    with tempfile.TemporaryDirectory(prefix="hicache-soak-") as directory:
        ran = site.pytest(
            "-q", "--tb=no", "-p", "no:cacheprovider", f"--basetemp={directory}/tmp", "--hicache-profile=smoke", f"--hicache-seed={seed}",
            f"--hicache-report={directory}/report", "-c", str(INI), "--rootdir=.", "control_suite.py", cwd=CONTROLS_HOME,
            seconds=SEED_SECONDS, HICACHE_CONTROLS=kind,
        )  # fmt: skip
        reports = sorted(Path(directory, "report").glob("*/results.json"))
        if not reports:
            raise RuntimeError(f"seed {seed} of the {kind} left no report:\n{ran.output[-3000:]}")
        return [_result(kind, seed, json.loads(report.read_text())) for report in reports]


def _result(kind: str, seed: int, report: dict) -> Result:
    cases = {case["name"]: case for rule in report["rules"] for case in rule["cases"]}.values()
    return Result(
        kind=kind,
        seed=seed,
        driver=report["driver"]["name"],
        verdict=report["verdict"],
        failed=[rule["id"] for rule in report["rules"] if rule["outcome"] == "fail"],
        errors=[f"{case['name']}: {case['reason']}" for case in cases if case["outcome"] == "error"],
        told=[f"{case['name']}: {case['reason']}" for case in cases if case["outcome"] == "fail"],
    )


def document(results: list[Result], state: str) -> str:
    """The page of the docs."""
    mutants, right = _by_driver(results, "mutants"), _by_driver(results, "right")
    killed = sum(all(result.is_as_meant for result in found) for found in mutants.values())
    accepted = sum(all(result.is_as_meant for result in found) for found in right.values())
    seeds = {kind: len({result.seed for result in results if result.kind == kind}) for kind in ("mutants", "right")}
    lines = [
        "# The suite's own long test",
        "",
        "`make soak` plants faults into drivers and looks whether the suite finds each by the rule that is meant for it, on every",
        "seed; and it runs drivers that are right, which the suite has to accept on every seed. This page is its result.",
        "",
        f"Sources {state[:12]}, profile smoke, {os.cpu_count()} cores.",
        "",
        f"- **{killed} of {len(mutants)} mutants killed**, each on {seeds['mutants']} seeds.",
        f"- **{accepted} of {len(right)} right drivers accepted**, each on {seeds['right']} seeds.",
        "",
        "| mutant | rules meant for it | fault of the field | seeds |",
        "| --- | --- | --- | --- |",
        *(
            f"| {name} | {', '.join(CONTROLS[name].breaks)} | {CONTROLS[name].field_fault} | {_score(mutants[name])} |"
            for name in CONTROLS
            if name in mutants
        ),
        "",
        "| right driver | seeds |",
        "| --- | --- |",
        *(f"| {name} | {_score(found)} |" for name, found in sorted(right.items())),
    ]
    bad = [result for result in results if not result.is_as_meant]
    if bad:
        lines += ["", "Not as meant:", ""]
        lines += [
            f"- {result.driver}, seed {result.seed}: {'; '.join(result.errors or result.told) or 'not found'}" for result in bad
        ]
    return "\n".join(lines) + "\n"


def _by_driver(results: list[Result], kind: str) -> dict[str, list[Result]]:
    found = dict[str, list[Result]]()
    for result in results:
        if result.kind == kind:
            found.setdefault(result.driver, []).append(result)
    return found


def _score(found: list[Result]) -> str:
    return f"{sum(result.is_as_meant for result in found)} of {len(found)}"


def state_of_sources() -> str:
    """Digest of everything that a result depends on."""
    digest = hashlib.sha256()
    for path in sorted(path for top in SOURCES for path in (ROOT / top).rglob("*.*") if path.suffix in (".py", ".toml")):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    """Run what is missing in the record, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutant-seeds", type=int, default=20)
    parser.add_argument("--right-seeds", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--record", type=Path, default=ROOT / "out" / "soak.jsonl")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "soak.md")
    options = parser.parse_args()
    state = state_of_sources()
    record = Record(options.record, state)
    wanted = [("mutants", seed) for seed in range(options.mutant_seeds)] + [
        ("right", seed) for seed in range(options.right_seeds)
    ]
    missing = [(kind, seed) for kind, seed in wanted if seed not in record.done(kind)]
    with tempfile.TemporaryDirectory(prefix="hicache-site-") as directory, ThreadPoolExecutor(options.jobs) as pool:
        site = Site(Path(directory))

        def one(job: tuple[str, int]) -> None:
            results = run_seed(site, *job)
            record.add(results)
            bad = [result for result in results if not result.is_as_meant]
            print(f"{job[0]} seed {job[1]}: {len(results) - len(bad)} of {len(results)} as meant", flush=True)
            for result in bad:
                print(f"  {result.driver}: {'; '.join(result.errors or result.told)[:1000] or 'not found'}", flush=True)

        list(pool.map(one, missing))
    options.document.write_text(document(record.results, state))
    sys.exit(any(not result.is_as_meant for result in record.results))


if __name__ == "__main__":
    main()
