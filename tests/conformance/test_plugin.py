"""The suite in somebody else's pytest: six lines, -k, xdist, and no trace where it is not used."""

from __future__ import annotations

import pytest

from tests.support.commands import run_python

pytestmark = [pytest.mark.slow(seconds=80), pytest.mark.merge]

SIX_LINES = """
from hicache_conformance import DriverConformance

class TestMemory(DriverConformance):
    driver = "memory"
    config = {"store": "six-lines"}
"""
CORE = ("--hicache-level=core", "--hicache-profile=smoke", "--hicache-seed=3", "-q")


@pytest.fixture
def project(tmp_path):
    """An author's project with a strict configuration of its own."""
    return _make_project(tmp_path)


@pytest.fixture(scope="module")
def alone(site, tmp_path_factory):
    """A run without workers, and its report."""
    project = _make_project(tmp_path_factory.mktemp("project"))
    return site.pytest(*CORE, "--hicache-report=alone", cwd=project), project / "alone"


def _make_project(directory):
    (directory / "pytest.ini").write_text(
        "[pytest]\naddopts = --strict-markers --strict-config -p no:cacheprovider\nxfail_strict = "
        "true\nfilterwarnings = error\n"
    )
    (directory / "test_memory.py").write_text(SIX_LINES)
    return directory


def test_six_lines_are_enough(alone):
    ran, _ = alone
    assert ran.status == 0, ran.output
    assert "HiCacheStorage v2: memory" in ran.output
    assert "\nconformant: every rule" in ran.output
    assert "seed 3" in ran.output


@pytest.mark.long
def test_a_rule_s_cases_can_be_chosen(site, project):
    ran = site.pytest(*CORE, "-k", "GET-7", "-vv", cwd=project)
    assert ran.status == 0
    assert "test_damage_is_counted_and_told_once PASSED" in ran.output
    assert "test_pages_read_back" not in ran.output
    assert "\nincomplete: " in ran.output


@pytest.mark.long
def test_workers_report_to_one_verdict(site, project, alone, results):
    spread = site.pytest(
        *CORE,
        "-n2",
        "--hicache-report=spread",
        cwd=project,
        plugins="hicache_conformance.plugin,xdist,xdist.looponfail",
    )
    assert spread.status == 0, spread.output
    one, two = results(alone[1]), results(project / "spread")
    assert one["verdict"] == two["verdict"] == "conformant"
    assert one["seed"] == two["seed"] == 3

    def outcomes(report):
        return {rule["id"]: (rule["outcome"], len(rule["cases"])) for rule in report["rules"]}

    assert outcomes(one) == outcomes(two)


@pytest.mark.long
def test_a_report_with_a_worse_verdict_fails_the_run(site, project):
    assert site.pytest(*CORE, "-k", "GET-6", cwd=project).status == 0
    assert site.pytest(*CORE, "-k", "GET-6", "--hicache-report=out", cwd=project).status == 1


def test_a_failure_shows_in_the_author_s_terminal(site, project):
    (project / "test_memory.py").write_text(SIX_LINES.replace('"memory"', '"Rewrites"'))
    ran = site.pytest(*CORE, "-k", "existing_pages", cwd=project)
    assert ran.status == 1
    assert "Violation: SET-3: page 0 key" in ran.output
    assert "non-conformant: breaks SET-3" in ran.output


@pytest.mark.long
def test_options_known_at_run_time(site, project):
    text = """
import pytest
from hicache_conformance import DriverConformance

class TestMemory(DriverConformance):
    driver = "memory"

    @pytest.fixture
    def driver_config(self, tmp_path):
        return {"store": str(tmp_path)}
"""
    (project / "test_memory.py").write_text(text)
    assert site.pytest(*CORE, "-k", "SET-1", cwd=project).status == 0


@pytest.mark.long
def test_two_drivers_two_reports(site, project, results):
    (project / "test_more.py").write_text(
        SIX_LINES.replace("TestMemory", "TestMore").replace('"memory"', '"Objects"')
    )
    ran = site.pytest(*CORE, "-k", "GET-6", "--hicache-report=out", cwd=project)
    assert "HiCacheStorage v2: Objects" in ran.output
    assert {
        results(project / "out" / name)["driver"]["name"] for name in ("memory", "Objects")
    } == {"memory", "Objects"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("option", "driver", "words"),
    [
        ("--hicache-level=cor", 'driver = "memory"', "unknown level 'cor'"),
        ("--hicache-profile=slow", 'driver = "memory"', "unknown profile 'slow'"),
        ("--hicache-page-bytes=100", 'driver = "memory"', "pages are multiples of 512 bytes"),
        ("--hicache-level=core", "pass", "TestMemory names no driver"),
    ],
)
def test_what_cannot_be_run_is_a_usage_error(site, project, option, driver, words):
    (project / "test_memory.py").write_text(SIX_LINES.replace('driver = "memory"', driver))
    ran = site.pytest(option, cwd=project)
    assert ran.status == 4
    assert words in ran.output


def test_the_base_class_of_an_authors_test_imports_no_foreign_interface():
    code = "import sys; from hicache_conformance import DriverConformance; print(*sys.modules)"
    loaded = {name for name in run_python(code).stdout.split() if ".interfaces." in name}
    home = "hicache_conformance.interfaces"
    assert loaded == {f"{home}.interface"}


def test_a_run_that_does_not_use_it_is_not_disturbed(site, tmp_path):
    (tmp_path / "test_other.py").write_text(
        "import sys\n\n"
        "def test_light():\n"
        "    heavy = {'torch', 'hypothesis', 'msgspec', 'jinja2', 'hicache_storage', "
        "'hicache_conformance.runner.session'}\n"
        "    assert not heavy & set(sys.modules)\n"
    )
    for extra in ((), ("-n2",)):
        plugins = "hicache_conformance.plugin" + (",xdist,xdist.looponfail" if extra else "")
        ran = site.pytest(
            "-W", "error", "-p", "no:cacheprovider", *extra, cwd=tmp_path, plugins=plugins
        )
        assert ran.status == 0, ran.output
        assert "hicache" not in ran.output.lower().replace(
            "hicache_conformance.plugin", ""
        ).replace("plugins: hicache", "")
