"""Runs of the suite in processes of their own, with the sample drivers installed."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import hicache_conformance
from hicache_storage.tools.scaffold import check_name, make_package

SUITE = Path(hicache_conformance.__file__).with_name("suite")
MUTANTS = Path(__file__).with_name("mutants")
HICACHE = "from hicache_storage.cli.main import main; main()"


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    status: int
    output: str
    directory: Path = Path()
    """Of its report, where it has one."""

    @property
    def words(self):
        """The output as one line."""
        return " ".join(self.output.split())

    @functools.cached_property
    def report(self):
        """The content of `results.json`."""
        return json.loads((self.directory / "results.json").read_text())

    @property
    def cases(self):
        """The cases of the report by name."""
        return {case["name"]: case for rule in self.report["rules"] for case in rule["cases"]}

    def rules(self, outcome):
        """The selected rules of an outcome."""
        found = [rule for rule in self.report["rules"] if rule["selected"]]
        return {rule["id"] for rule in found if rule["outcome"] == outcome}


class Site:
    """An environment in which further driver packages count as installed.

    Their metadata lies on the path.
    """

    def __init__(self, directory):
        self.directory = directory
        self.reports = directory / "reports"
        self.reports.mkdir()
        self.package = directory / "hicache-memory-driver"
        """A driver as `hicache new` makes it."""
        make_package(check_name("memory"), self.package)
        self._install("hicache-samples", "samples = drivers_plugin")
        self._install("hicache-memory-driver", "memory = hicache_memory_driver.plugin")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
            "PYTHONPATH": os.pathsep.join(
                filter(
                    None,
                    map(str, [directory, MUTANTS, self.package, os.environ.get("PYTHONPATH", "")]),
                )
            ),
            "COLUMNS": "160",
        }

    def hicache(self, *arguments, cwd=None, **variables):
        """Run the command `hicache`."""
        return self._run("-c", HICACHE, *arguments, cwd=cwd, **variables)

    def judge(self, line, *, cwd=None, **variables):
        """Run `hicache conformance run` with a line of arguments, and with a report."""
        directory = Path(tempfile.mkdtemp(dir=self.reports))
        words = ("conformance", "run", *shlex.split(line), "--report", str(directory))
        ran = self.hicache(*words, cwd=cwd, **variables)
        return replace(ran, directory=directory)

    @contextlib.contextmanager
    def started(self, *arguments, stderr=subprocess.DEVNULL, **variables):
        """The command `hicache`, while it runs; killed at the end if it still does."""
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", HICACHE, *arguments],
            cwd=self.directory,
            env={**self.environment, **variables},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def pytest(
        self, *arguments, cwd, plugins="hicache_conformance.plugin", seconds=840, **variables
    ):
        """Run pytest in a directory, with no plugin but the suite's and those named."""
        chosen = [part for name in plugins.split(",") for part in ("-p", name)]
        return self._run(
            "-m",
            "pytest",
            *chosen,
            *arguments,
            cwd=cwd,
            seconds=seconds,
            PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
            **variables,
        )

    def samples(self, drivers, seed, directory, seconds):
        """Run the suite against samples; a report of each lies below `directory`/report."""
        directory.mkdir(exist_ok=True)
        options = "-q --tb=no --no-header -p no:cacheprovider --rootdir=. --hicache-profile=smoke"
        return self.pytest(
            *options.split(),
            f"--basetemp={directory}/tmp",
            f"--hicache-seed={seed}",
            f"--hicache-report={directory}/report",
            *("-c", str(SUITE / "pytest.ini")),
            *(f"drivers_suite.py::Test{name}" for name in drivers),
            cwd=MUTANTS,
            plugins="hicache_conformance.plugin,drivers_suite",
            seconds=seconds,
        )

    def _run(self, *arguments, cwd, seconds=840, **variables):
        command = [sys.executable, "-P", *arguments]
        done = subprocess.run(
            command,
            cwd=cwd or self.directory,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        return Ran(done.returncode, done.stdout + done.stderr)

    def _install(self, name, entry_point):
        info = self.directory / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[hicache_storage.drivers]\n{entry_point}\n")


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    return Site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def results():
    """Read the `results.json` of a report."""
    return lambda directory: json.loads((directory / "results.json").read_text())
