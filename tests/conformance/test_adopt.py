"""`hicache conformance adopt`: the test that it writes, with runs of the suite that are made up."""

from __future__ import annotations

import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from hicache_conformance.model.outcomes import Outcome, Replay
from hicache_conformance.report.files import REQUIREMENTS, write_adopted
from hicache_conformance.report.results import as_json, results
from tests.conformance.records import ended, header, judged

# Copies what a run has found, and exits with its status.
COMMAND = """
import pathlib, sys

def main():
    [report] = [each.partition("=")[2] for each in sys.argv if each.startswith("--report=")]
    found = pathlib.Path(sys.argv[1])
    if found.exists():
        (pathlib.Path(report) / "results.json").write_text(found.read_text())
    print("the suite could not begin" if not found.exists() else "judged")
    sys.exit(not found.exists() and 2)
"""
FOUND = {"test_a": Outcome.FAIL, "test_b[1]": Outcome.FAIL, "test_c": Outcome.PASS}


def _judged(found):
    run = header(replay=Replay(run="adopt", options={}, interface="sglang"))
    rules = {name: "SET-1" if name == "test_c" else "GET-1" for name in found}
    reason = "GET-1: page 3 key 'k' of pool 'kv' holds \"another's\" bytes"
    cases = [
        ended(
            name,
            rules[name],
            outcome=outcome,
            reason=reason,
            broken_rule=rules[name] * (outcome is Outcome.FAIL),
        )
        for name, outcome in found.items()
    ]
    return run, judged(*cases, run=run)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """Verdict of the adopted test on each rule, by what another run of the suite finds."""
    home = tmp_path_factory.mktemp("adopted")
    commands = home / "hicache_storage" / "cli"
    commands.mkdir(parents=True)
    for file in (commands.parent / "__init__.py", commands / "__init__.py"):
        file.touch()
    (commands / "main.py").write_text(COMMAND)
    runs = {
        "same": FOUND,
        "another_case": FOUND | {"test_d": Outcome.FAIL},
        "another_rule": FOUND | {"test_c": Outcome.FAIL},
        "mended": FOUND | {"test_a": Outcome.PASS, "test_b[1]": Outcome.PASS},
        "half_mended": FOUND | {"test_a": Outcome.PASS},
        "nobody_found_out": FOUND | {"test_a": Outcome.UNTESTED, "test_b[1]": Outcome.UNTESTED},
        "suite_broke": FOUND | {"test_c": Outcome.ERROR},
        "no_run": None,
    }
    _, adopted = _judged(FOUND)
    for name, found in runs.items():
        directory = home / name
        file = directory / "found.json"
        expected = write_adopted(directory, "sglang", "driver", [[str(file)]], adopted, {"GET-2"})
        assert expected == ["GET-1"]
        if found is not None:
            file.write_text(as_json(results(*_judged(found))))
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST")}
    options = "-q -p no:cacheprovider -o junit_family=xunit1 --import-mode=importlib --rootdir=."
    subprocess.run(
        [sys.executable, "-m", "pytest", *options.split(), "--junitxml=junit.xml", *runs],
        cwd=home,
        env={**environment, "PYTHONPATH": str(home), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    told = dict[str, dict[str, tuple[str, str]]]()
    for case in ElementTree.parse(home / "junit.xml").iter("testcase"):
        result = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        rule = case.attrib["name"].partition("[")[2].removesuffix("]")
        verdict = "passed" if result is None else result.attrib.get("type") or result.tag
        told.setdefault(case.attrib["file"].partition("/")[0], {})[rule] = (
            verdict,
            "" if result is None else result.attrib["message"] + (result.text or ""),
        )
    return told


@pytest.mark.parametrize(
    ("run", "rule", "verdict", "words"),
    [
        ("same", "GET-1", "pytest.xfail", 'a page holds "another\'s" bytes'),
        ("same", "SET-1", "passed", ""),
        ("same", "GET-3", "pytest.skip", "untested: "),
        ("another_case", "GET-1", "failure", "--case test_d"),
        ("another_rule", "SET-1", "failure", "--case test_c"),
        ("another_rule", "GET-1", "pytest.xfail", ""),
        ("mended", "GET-1", "failure", "[XPASS(strict)]"),
        ("half_mended", "GET-1", "failure", "pass, and are in EXPECTED: ['test_a']"),
        ("nobody_found_out", "GET-1", "pytest.skip", "untested: "),
        ("suite_broke", "SET-1", "failure", "--case test_c"),
        ("no_run", "SET-1", "error", "the suite could not begin"),
    ],
)
def test_an_adopted_test(verdicts, run, rule, verdict, words):
    told, message = verdicts[run][rule]
    assert told == verdict, message
    assert words in message


def test_a_rule_that_the_interface_does_not_promise_has_no_test(verdicts):
    assert "GET-2" not in verdicts["same"]
    assert "GET-4" in verdicts["same"]


def test_the_requirement_is_a_version_of_an_index(tmp_path):
    write_adopted(tmp_path, "sglang", "driver", [], _judged(FOUND)[1], ())
    name, version = (tmp_path / REQUIREMENTS).read_text().split("==")
    assert name == "hicache-storage[conformance]"
    assert "+" not in version


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ollama",), "unknown engine 'ollama'; engines are sglang, vllm, lmcache"),
        (("sglang", "-c", "api_key=x"), "-c api_key: what looks like a secret"),
        (("vllm", "--driver", "nobody"), "'nobody' is neither MODULE:CLASS nor one of vllm-fs"),
    ],
)
def test_what_cannot_be_adopted_exits_2(site, tmp_path, arguments, words):
    ran = site.hicache("conformance", "adopt", *arguments, cwd=tmp_path)
    assert ran.status == 2
    assert words in " ".join(ran.output.split())
    assert list(tmp_path.iterdir()) == []
