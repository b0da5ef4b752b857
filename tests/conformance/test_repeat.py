"""The command that repeats a case, and `--start-server`."""

from __future__ import annotations

import html
import re
import shlex
import sys
from pathlib import Path

import msgspec
import pytest

from hicache_conformance.model.fault_plan import FaultPlan
from hicache_conformance.report.results import store_is_fresh

pytestmark = [pytest.mark.slow(seconds=90), pytest.mark.merge]

RUN = ("conformance", "run")
CASE = "test_random_faults[objects]"
SEED = 4
"""Of a run of which a plan lets writes fail."""
SERVER = Path(__file__).with_name("mutants") / "drivers_server.py"


@pytest.fixture(scope="module")
def flawed(site):
    """The report of a run that has found a fault."""
    line = f"AcknowledgesAll --level faults --case {CASE[:-1]} --profile smoke --seed {SEED}"
    ran = site.judge(line)
    assert ran.status == 1, ran.output
    return ran


@pytest.fixture(scope="module")
def failure(flawed):
    """The failing case in the results."""
    return flawed.cases[CASE]


@pytest.mark.long
def test_the_faults_of_a_case_are_in_the_results(failure):
    plans = msgspec.convert(failure["plans"], list[FaultPlan])
    assert {plan.injector for plan in plans} == {"objects"}
    assert "plan=FaultPlan(" in failure["detail"]


def test_each_failure_is_shown_with_what_repeats_it(flawed, failure):
    shown = re.search(rf"fail {failure['broken_rule']}: .*\n  again: (.*)", flawed.output)[1]
    assert shown == failure["reproduce"]
    assert shown in html.unescape((flawed.directory / "index.html").read_text("utf-8"))
    words = shlex.split(shown)
    assert words[:4] == ["hicache", *RUN, "AcknowledgesAll"]
    for option, value in (
        ("-c", "path={tmp}/store"),
        ("--seed", str(flawed.report["seed"])),
        ("--case", CASE),
        ("--profile", "smoke"),
        ("--run-id", flawed.report["replay"]["run"]),
    ):
        assert words[words.index(option) + 1] == value


def test_the_shown_command_works_anywhere_fails_again_and_shrinks(site, failure, tmp_path):
    words = shlex.split(failure["reproduce"])[1:]
    ran = site.hicache(*words, cwd=tmp_path)
    assert ran.status == 1, ran.output
    assert f"fail {failure['broken_rule']}: page" in ran.output
    log = ran.output.split("Last log lines:\n")[1]
    assert re.search(r"^  WARNING +sample:.* acknowledges whatever comes$", log, re.MULTILINE)
    # Little is left beside a set of one page after the faults have begun.
    shown = ran.output.partition("plan=FaultPlan(")[2].partition("\n\n")[0]
    assert 1 <= len(re.findall(r"'(set|get|exists)'", shown)) <= 4
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("durability", "options", "fresh"),
    [
        ("process", {"path": "{tmp}/x"}, True),
        ("process", {"port": "{port:a}"}, True),
        ("none", {"url": "u"}, True),
        ("machine", {}, False),
    ],
)
def test_when_a_run_begins_with_an_empty_store(durability, options, fresh):
    assert store_is_fresh({"durability": durability}, options) is fresh


# --start-server
# -------------------------------------------------------------------------------------------------------------

SERVE = shlex.join([sys.executable, "-P", str(SERVER), "{port:mine}", "{tmp}/log"])


@pytest.mark.long
def test_a_server_of_the_command_line_is_in_the_command_that_repeats_a_failure(site):
    ran = site.judge(
        "TakesAnythingForAnAnswer --level faults --profile smoke --seed 3 --case network-refused "
        f"--case one_page -c port={{port:mine}} --start-server {shlex.quote(SERVE)}"
    )
    assert ran.status == 1, ran.output
    passed = {name for name, case in ran.cases.items() if case["outcome"] == "pass"}
    injectors = ("network", "services", "objects")
    assert {f"test_one_page_fails[{injector}]" for injector in injectors} <= passed
    assert ran.report["replay"]["services"] == [SERVE]
    told = "test_a_trouble_is_a_miss[network-refused]"
    again = site.hicache(*shlex.split(ran.cases[told]["reproduce"])[1:])
    assert again.status == 1, again.output
    assert f"[{told}]" in again.output


@pytest.mark.long
def test_a_port_that_no_server_has_exits_2(site):
    ran = site.judge(f"Networked -c port={{port:other}} --start-server {shlex.quote(SERVE)}")
    assert ran.status == 2, ran.output
    assert "no server listens on {port:other}; start one with --start-server" in ran.words


@pytest.mark.long
def test_a_class_names_its_servers(site, tmp_path, results):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_networked.py").write_text(
        "from hicache_conformance import DriverConformance\n\n"
        "class TestNetworked(DriverConformance):\n"
        f"    driver, config, services = 'Networked', {{'port': '{{port:mine}}'}}, [{SERVE!r}]\n"
    )
    arguments = "-q -p no:cacheprovider --hicache-level=faults --hicache-profile=smoke"
    more = "--hicache-report=out -k one_page_fails"
    ran = site.pytest(*arguments.split(), *more.split(), cwd=tmp_path)
    assert "3 passed" in ran.output, ran.output
    report = results(tmp_path / "out")
    assert report["replay"]["services"] == [SERVE]
    assert report["options"] == {"port": "{port:mine}"}
