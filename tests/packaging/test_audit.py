"""Judgement of a report by `make audit`."""

from __future__ import annotations

import datetime
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "scripts" / "audit_dependencies.py"
TODAY = datetime.date(2027, 1, 15)
WEAKNESS = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.0"], "description": "..."}
REPORT = [
    {"name": "good", "version": "1.0", "vulns": []},
    {"name": "bad", "version": "1.0", "vulns": [WEAKNESS]},
    {"name": "ours", "skip_reason": "not on PyPI"},
]


@pytest.fixture(scope="module")
def audit():
    spec = importlib.util.spec_from_file_location("audit_dependencies", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def accepted(audit, **changes):
    given = {
        "id": "CVE-1",
        "package": "bad",
        "reason": "not called",
        "until": datetime.date(2027, 1, 15),
        **changes,
    }
    return [audit.Acceptance(**given)]


def test_a_finding_is_red_until_it_is_accepted_and_after(audit):
    for acceptances, findings in (
        ([], 1),
        (accepted(audit), 0),
        (accepted(audit, id="PYSEC-1"), 0),
        (accepted(audit, package="good"), 1),
        (accepted(audit, until=datetime.date(2027, 1, 14)), 1),
    ):
        verdict = audit.judge(REPORT, acceptances, TODAY)
        assert len(verdict.findings) == findings, acceptances
        assert (verdict.audited, verdict.unknown) == (2, ["ours"])
    assert audit.judge(REPORT, accepted(audit, id="CVE-2"), TODAY).unused == ["CVE-2"]


def test_what_nobody_knows_is_not_audited(audit):
    with pytest.raises(audit.NotAuditedError):
        audit.judge([REPORT[2]], [], TODAY)


@pytest.mark.parametrize(
    ("probe", "report", "status", "said"),
    [
        ([REPORT[0]], REPORT, 1, "bad 1.0: CVE-1, PYSEC-1; fixed in 2.0"),
        ([REPORT[0]], REPORT[:1], 0, "1 packages audited"),
        (
            [REPORT[2]],
            REPORT,
            0,
            "NOT AUDITED: the vulnerability service does not answer for packages of PyPI",
        ),
        (None, REPORT, 0, "NOT AUDITED: the vulnerability service cannot be reached: no network"),
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


def test_what_is_accepted_has_a_reason_and_an_end(audit, tmp_path):
    assert isinstance(audit.read_accepted(audit.ACCEPTED), list)
    file = tmp_path / "accepted.toml"
    for entry in (
        'id = "CVE-1"\npackage = "x"\nreason = " "\nuntil = 2027-01-01',
        'id = "CVE-1"',
        'id = "a"\npackage = "x"\nreason = "r"\nuntil = "soon"',
    ):
        file.write_text(f"[[accepted]]\n{entry}\n")
        with pytest.raises(ValueError, match="entry 1"):
            audit.read_accepted(file)
