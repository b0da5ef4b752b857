"""Judgement of a report by `make audit`."""

from __future__ import annotations

import datetime
import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "scripts" / "audit_dependencies.py"
TODAY = datetime.date(2027, 1, 15)
WEAKNESS = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.0"], "description": "..."}
GOOD = {"name": "good", "version": "1.0", "vulns": []}
BAD = {"name": "bad", "version": "1.0", "vulns": [WEAKNESS]}
UNKNOWN = {"name": "ours", "skip_reason": "not on PyPI"}


@pytest.fixture(scope="module")
def audit():
    spec = importlib.util.spec_from_file_location("audit_dependencies", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("probe", "report", "status", "said"),
    [
        ([GOOD], [GOOD, BAD, UNKNOWN], 1, "bad 1.0: CVE-1, PYSEC-1; fixed in 2.0"),
        ([GOOD], [GOOD, UNKNOWN], 0, "1 packages audited, 1 unknown: 0 findings"),
        ([GOOD], [UNKNOWN], 0, "NOT AUDITED: not on PyPI"),
        ([UNKNOWN], [GOOD], 0, "NOT AUDITED: not on PyPI"),
        (None, [GOOD], 0, "no network\nNOT AUDITED: the vulnerability service does not answer"),
    ],
)
def test_the_command(audit, monkeypatch, capsys, probe, report, status, said):
    def run(command, **_):
        found = probe if "--requirement" in command else report
        text = "" if found is None else json.dumps({"dependencies": found})
        return subprocess.CompletedProcess(command, 1, stdout=text, stderr="no network\n")

    monkeypatch.setattr(audit.subprocess, "run", run)
    monkeypatch.setattr(audit.sys, "argv", ["audit"])
    assert audit.main() == status
    told = capsys.readouterr()
    assert said in told.out + told.err
    monkeypatch.setattr(audit.sys, "argv", ["audit", "--required"])
    assert audit.main() == (2 if "NOT AUDITED" in said else status)
