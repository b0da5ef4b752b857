"""`hicache conformance repro` and `--start-server`: a failure out of its results.

In another process, another directory, later.
"""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from random import Random

import msgspec
import pytest

from hicache_conformance.injectors.random_plan import generate_plan
from hicache_conformance.model.fault_plan import Fault, FaultKind, FaultPlan
from hicache_conformance.model.outcomes import CaseOutcome, Outcome, Replay
from hicache_conformance.report.results import store_is_fresh
from hicache_conformance.runner.replay import Record, RecordedCase, Repetition

pytestmark = pytest.mark.slow(seconds=90)

RUN, REPRO = ("conformance", "run"), ("conformance", "repro")
CASE = "test_random_faults[objects]"
SERVER = Path(__file__).with_name("mutants") / "drivers_server.py"

# Acknowledges pages that could not be written. A driver of the same name without the fault is
# right.
DRIVER = """
import logging
from drivers_files import SharedFiles

class Flawed(SharedFiles):
    pass
"""
FAULT = """
    def batch_set_v2(self, transfers, extra_info=None):
        logging.getLogger("flawed").info("acknowledges whatever comes")
        return {pool: [True] * len(pages) for pool, pages in super().batch_set_v2(transfers, extra_info).items()}
"""
PLUGIN = """
from sample_driver import PATH
from drivers_faults import BUFFERED
from hicache_storage.hookspecs import DriverSpec, hookimpl

@hookimpl
def hicache_register_drivers():
    return [
        DriverSpec(
            name="Flawed", target="flawed:Flawed", config="drivers_files:SharedFilesConfig", trial_config=PATH,
            capabilities=BUFFERED,
        )
    ]
"""


def _seed():
    """The first seed with a plan in which no write succeeds.

    Some set is refused then while the faults last.
    """
    for seed in range(1000):
        for number in range(3):
            plan = generate_plan(
                "objects", Random(f"{seed}/{CASE}/plan {number}"), hangs=False, engines=True
            )
            if any(
                fault.kind is FaultKind.ERROR
                and not fault.first
                and not fault.count
                and not plan.destroys
                for fault in plan.faults
            ):
                return seed
    raise AssertionError("no such seed")


@pytest.fixture(scope="module")
def flawed(site, tmp_path_factory):
    """A directory with a driver that has a fault, and the report of a run that has found it."""
    home = tmp_path_factory.mktemp("flawed")
    info = home / "flawed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flawed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hicache_storage.drivers]\nflawed = flawed_plugin\n")
    (home / "flawed_plugin.py").write_text(PLUGIN)
    (home / "flawed.py").write_text(DRIVER + FAULT)
    ran = hicache(
        site,
        home,
        *RUN,
        "Flawed",
        "--level",
        "faults",
        "--case",
        CASE,
        "--profile",
        "smoke",
        "--seed",
        str(_seed()),
        "--report",
        str(home / "report"),
    )
    assert ran.status == 1, ran.output
    return home, ran.output


def hicache(site, home, *arguments, cwd=None):
    path = f"{home}:{site.environment['PYTHONPATH']}"
    return site.hicache(*arguments, cwd=cwd, PYTHONPATH=path)


@pytest.fixture(scope="module")
def failure(flawed, results):
    """The rule that was broken, and its failing case in the results."""
    report = results(flawed[0] / "report")
    rule = next(rule for rule in report["rules"] if rule["outcome"] == "fail")
    (case,) = rule["cases"]
    assert case["outcome"] == "fail"
    return rule["id"], case


@pytest.mark.long
def test_the_faults_of_a_case_are_in_the_results(failure):
    _, case = failure
    plans = msgspec.convert(case["plans"], list[FaultPlan])
    assert {plan.injector for plan in plans} == {"objects"}
    # The last one is the one it has failed with.
    assert plans[-1].as_json() in case["detail"]


def test_each_failure_is_shown_with_what_repeats_it(flawed, failure):
    (home, output), (rule, case) = flawed, failure
    shown = re.search(rf"fail {rule}: .*\n  again: hicache (.*)", output)[1]
    assert shlex.split(shown) == [*REPRO, str(home / "report" / "results.json"), rule]
    page = html.unescape((home / "report" / "index.html").read_text("utf-8"))
    assert f"hicache conformance repro results.json {rule}" in page
    # Without the results, by a command that says all of it.
    assert case["reproduce"] in page
    words = shlex.split(case["reproduce"])
    assert words[:4] == ["hicache", *RUN, "Flawed"]
    settings = results_of(home)
    for option, value in (
        ("-c", "path={tmp}/store"),
        ("--seed", str(settings["seed"])),
        ("--case", CASE),
        ("--profile", "smoke"),
        ("--run-id", settings["replay"]["run"]),
    ):
        assert words[words.index(option) + 1] == value


def test_the_shown_command_works_anywhere_fails_again_and_shrinks(site, flawed, failure, tmp_path):
    (home, output), (rule, case) = flawed, failure
    shown = re.search(rf"fail {rule}: .*\n  again: hicache (.*)", output)[1]
    ran = hicache(site, home, *shlex.split(shown), cwd=tmp_path)
    assert ran.status == 1, ran.output
    assert f"{CASE}: fails again" in ran.output
    assert f"{rule}: page" in ran.output
    assert "Faults (made as short as it could be)" in ran.output
    shortest = FaultPlan.from_json(re.search(r"Plan: (\{.*\})", ran.output)[1])
    assert set(shortest.faults) <= set(msgspec.convert(case["plans"][-1], FaultPlan).faults)
    # What the run has not shown: the calls and what the driver has logged.
    calls, log = ran.output.split("Last calls:\n")[1].split("Last log lines:\n")
    last = calls.splitlines()[-1]
    assert re.fullmatch(r"  batch_get_v2\(kv: 1 key 'page\d+-\w+'\) -> kv: \[False\]", last)
    assert re.search(r"^  INFO +flawed:.* acknowledges whatever comes$", log, re.MULTILINE)
    # Little is left beside a set of one page after the faults have begun.
    assert len(re.findall(r"^  \d+\. ", ran.output, re.MULTILINE)) <= 4
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_replay_shows_calls_and_the_bytes_that_differ(site, tmp_path):
    case = ("--case", "test_misuse_is_no_fault_of_the_store")
    ran = site.hicache(
        *RUN, "SwappedKeys", *case, "--profile", "smoke", "--seed", "3", "--report", str(tmp_path)
    )
    assert "batch_set_v2" not in ran.output
    again = site.hicache(*REPRO, str(tmp_path), "GET-1")
    assert again.status == 1, again.output
    calls = again.output.split("Last calls:\n")[1]
    names = re.findall(r"^  (\w+)\(", calls, re.MULTILINE)
    assert names[-3:] == ["batch_set_v2", "get_stats", "batch_get_v2"]
    assert re.search(
        r"^  batch_get_v2\(kv: 3 keys '.*', ...\) -> kv: 3 of 3 True$", calls, re.MULTILINE
    )
    shown = {
        name: bytes.fromhex(text)
        for name, text in re.findall(r"^    (expected|found) +([0-9a-f ]+)$", calls, re.MULTILINE)
    }
    first = int(re.search(r"bytes 0 to 48 of 256, the first that differs is (\d+)", calls)[1])
    pairs = list(zip(shown["expected"], shown["found"], strict=True))
    assert len(pairs) == 48
    assert next(index for index, (a, b) in enumerate(pairs) if a != b) == first
    # Nothing of it is in the files of a report, which are the same for equal runs.
    assert "batch_get_v2(kv" not in (tmp_path / "results.json").read_text()


@pytest.mark.long
def test_a_repaired_driver_passes_from_the_same_results(site, flawed, failure, tmp_path):
    shutil.copytree(flawed[0], tmp_path / "home")
    (tmp_path / "home" / "flawed.py").write_text(DRIVER)
    ran = hicache(
        site,
        tmp_path / "home",
        *REPRO,
        str(tmp_path / "home" / "report" / "results.json"),
        failure[0],
    )
    assert ran.status == 0, ran.output
    assert "passes now" in ran.output
    assert "fails" not in ran.output


def results_of(home):
    return json.loads((home / "report" / "results.json").read_text())


def rewritten(home, target, **changes):
    """The results with some of their values changed."""
    content = results_of(home)
    for name, value in changes.items():
        *path, last = name.split("__")
        place = content
        for part in path:
            place = place[part]
        place[last] = value
    target.write_text(json.dumps(content))
    return target


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no.json", "GET-1"), "No such file or directory"),
        (("{report}", "GET-99"), "no rule 'GET-99' in these results"),
        (("{report}", "EV-1"), "EV-1 has no failing case in these results"),
        (
            ("{report}", "{rule}", "--case", "nothing_so"),
            "no failing case of {rule} has 'nothing_so' in its name; there are test_random",
        ),
        (("{report}", "{rule}", "-c", "path"), "is not of the form key=value"),
        (("{report}/index.html", "{rule}"), "is no results.json of this suite"),
    ],
)
def test_what_cannot_be_repeated_exits_2(site, flawed, failure, tmp_path, arguments, words):
    def named(text):
        return text.format(report=flawed[0] / "report", rule=failure[0])

    ran = hicache(site, flawed[0], *REPRO, *map(named, arguments), cwd=tmp_path)
    assert ran.status == 2, ran.output
    assert named(words) in ran.output.replace("\n", " ")


def test_results_that_do_not_say_how_they_came_about_exit_2(site, flawed, failure, tmp_path):
    results = rewritten(flawed[0], tmp_path / "old.json", replay=None)
    ran = hicache(site, flawed[0], *REPRO, str(results), failure[0])
    assert ran.status == 2
    assert "does not say how its run was begun" in ran.output


def test_hidden_options_have_to_be_given_again(site, flawed, failure, tmp_path):
    results = rewritten(
        flawed[0], tmp_path / "hidden.json", replay__options={"path": "{tmp}/store", "token": "***"}
    )
    ran = hicache(site, flawed[0], *REPRO, str(results), failure[0])
    assert ran.status == 2
    assert "do not show the secrets of token; give them again: -c token=..." in ran.output
    record = Record.read(results)
    assert record.config({"token": "t", "more": "m"}) == {
        "path": "{tmp}/store",
        "token": "t",
        "more": "m",
    }


@pytest.mark.long
def test_what_stands_in_the_way_is_told(site, flawed, failure, tmp_path):
    results = rewritten(
        flawed[0],
        tmp_path / "r.json",
        suite_version="0.0.1",
        options={"url": "http://store"},
        capabilities__durability="machine",
    )
    results.write_text(results.read_text().replace(CASE, "test_that_was_dropped"))
    ran = hicache(site, flawed[0], *REPRO, str(results), failure[0])
    assert ran.status == 2, ran.output
    assert "the results are of suite 0.0.1" in ran.output
    assert "--run-id gives these cases new ones" in ran.output
    assert "test_that_was_dropped: did not run: this suite has no such case" in ran.output


# Without a run
# -------------------------------------------------------------------------------------------------------

CUT = FaultPlan("network", (Fault(kind=FaultKind.CUT),))
DELAY = FaultPlan("network", (Fault(kind=FaultKind.DELAY),))


@pytest.mark.parametrize(
    ("outcome", "plans", "fails", "passes"),
    [
        (Outcome.FAIL, (CUT,), True, False),
        (Outcome.ERROR, (), True, False),
        (Outcome.PASS, (CUT, DELAY), False, True),
        (Outcome.PASS, (DELAY, CUT), False, False),
        (Outcome.UNTESTED, (CUT,), False, False),
    ],
)
def test_a_pass_counts_only_under_the_faults_of_the_file(outcome, plans, fails, passes):
    then = RecordedCase("test_x", Outcome.FAIL, "GET-1", "", (CUT,))
    again = Repetition(
        then,
        CaseOutcome(
            case="test_x", rules=("GET-1",), levels=("faults",), outcome=outcome, plans=plans
        ),
    )
    assert (again.fails, again.passes) == (fails, passes)


def test_what_hides_something_is_hidden():
    assert Replay(run="r", options={"a": "1", "b": "***", "url": "http://***@store"}).hidden == [
        "b",
        "url",
    ]


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
SMOKE = ("--level", "faults", "--profile", "smoke", "--seed", "3")


@pytest.mark.long
def test_a_server_of_the_command_line_is_there_again_when_a_failure_is_repeated(
    site, tmp_path, results
):
    ran = site.hicache(
        *RUN,
        "TakesAnythingForAnAnswer",
        *SMOKE,
        "--case",
        "told_once",
        "--case",
        "one_page",
        "--start-server",
        SERVE,
        "-c",
        "port={port:mine}",
        "--report",
        str(tmp_path),
    )
    assert ran.status == 1, ran.output
    report = results(tmp_path)
    names = {
        case["name"]
        for rule in report["rules"]
        for case in rule["cases"]
        if case["outcome"] == "pass"
    }
    assert {
        f"test_one_page_fails[{injector}]" for injector in ("network", "services", "objects")
    } <= names
    assert report["replay"]["services"] == [SERVE]
    asked = (*REPRO, str(tmp_path), "FT-1", "--case", "network")
    ran = site.hicache(*asked)
    assert ran.status == 2, ran.output
    assert "replay.services: nothing was run" in ran.output
    again = site.hicache(*asked, "--start-server", SERVE)
    assert again.status == 1, again.output
    assert "test_an_outage_is_told_once[network]: fails again" in again.output


@pytest.mark.long
@pytest.mark.parametrize(
    ("serve", "port", "words"),
    [
        ("", "1", "--start-server needs a command"),
        ("server 'of", "1", "No closing quotation"),
        (SERVE, "{port:other}", "no server listens on {port:other}; start one with --start-server"),
    ],
)
def test_servers_that_cannot_be_exit_2(site, serve, port, words):
    ran = site.hicache(*RUN, "Networked", *SMOKE, "--start-server", serve, "-c", f"port={port}")
    assert ran.status == 2, ran.output
    assert words in ran.output.replace("\n", " ")


@pytest.mark.long
def test_a_class_names_its_servers(site, tmp_path, results):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_networked.py").write_text(
        "from hicache_conformance import DriverConformance\n\n"
        "class TestNetworked(DriverConformance):\n"
        f"    driver, config, services = 'Networked', {{'port': '{{port:mine}}'}}, [{SERVE!r}]\n"
    )
    ran = site.pytest(
        "-q",
        "-p",
        "no:cacheprovider",
        "--hicache-level=faults",
        "--hicache-profile=smoke",
        "--hicache-report=out",
        "-k",
        "one_page_fails",
        cwd=tmp_path,
    )
    assert "3 passed" in ran.output, ran.output
    report = results(tmp_path / "out")
    assert report["replay"]["services"] == [SERVE]
    assert report["options"] == {"port": "{port:mine}"}
