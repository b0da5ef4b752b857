"""The long test of the suite itself: every mutant and every right driver on many seeds.

`make soak` runs it, and ends with status 1 where a mutant was not found, or a right driver blamed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HOME = Path(__file__).parent
sys.path[:0] = [str(HOME / "mutants"), str(HOME)]
from conftest import Site
from drivers_plugin import SAMPLES

SEED_SECONDS = 1800
KINDS = ("mutants", "right", "own")


def run_seed(site: Site, kind: str, seed: int, profile: str) -> dict[str, str]:
    """One pytest over all drivers of a kind: what was not as meant, by driver."""
    with tempfile.TemporaryDirectory(prefix="hicache-soak-") as directory:
        site.samples(kind, seed, Path(directory), SEED_SECONDS, profile=profile)
        reports = Path(directory, "report").rglob("results.json")
        return {
            report["driver"]["name"]: what_is_wrong(kind, report)
            for report in (json.loads(path.read_text()) for path in reports)
        }


def what_is_wrong(kind: str, report: dict) -> str:
    """Why a report is not as meant, or nothing."""
    cases = [case for rule in report["rules"] for case in rule["cases"]]
    errors = [case for case in cases if case["outcome"] == "error"]
    failed = [case for case in cases if case["outcome"] == "fail"]
    rules = {rule["id"] for rule in report["rules"] if rule["outcome"] == "fail"}
    missed = set()
    match kind:
        case "mutants":
            missed = set(SAMPLES[report["driver"]["name"]].breaks) - rules
            failed = failed if missed else []
        case "own":
            missed = set() if report["verdict"] == "conformant" else {report["verdict"]}
    told = [f"{case['name']}: {case['reason']}" for case in (*errors, *failed)]
    return "; ".join([*sorted(missed), *told])[:1000]


def main() -> None:
    """Run all seeds, and print what was not as meant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--profile", default="smoke")
    # Half of the time is spent waiting for what hangs.
    parser.add_argument("--jobs", type=int, default=3 * (os.cpu_count() or 1) // 2)
    options = parser.parse_args()
    wrong, tried = Counter[str](), Counter[str]()
    with (
        tempfile.TemporaryDirectory(prefix="hicache-site-") as directory,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        site = Site(Path(directory))

        def one(job: tuple[int, str]) -> None:
            seed, kind = job
            try:
                found = run_seed(site, kind, seed, options.profile)
            except subprocess.TimeoutExpired as error:
                found = {kind: str(error)}
            tried.update(found)
            for driver, message in found.items():
                if message:
                    wrong[driver] += 1
                    print(f"{kind} seed {seed}: {driver}: {message}", flush=True)

        list(pool.map(one, [(seed, kind) for seed in range(options.seeds) for kind in KINDS]))
    missing = [name for name in SAMPLES if tried[name] < options.seeds]
    print(
        f"{len(tried)} drivers on {options.seeds} seeds, {len(wrong)} not as meant: {dict(wrong)}"
    )
    print(f"without a report on each seed: {missing}")
    sys.exit(bool(wrong or missing))


if __name__ == "__main__":
    main()
