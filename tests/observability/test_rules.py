"""The alert rules, read and tried by Prometheus' own tool."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.commands import run_program

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus-alerts.yaml"
[GROUP] = yaml.safe_load(RULES.read_text())["groups"]
TESTS = Path(__file__).with_name("alert_rules.yaml")


def promtool(*arguments):
    """Of Debian's package `prometheus`; scripts/setup.sh puts it beside Python where the machine
    has none."""
    program = shutil.which("promtool") or shutil.which("promtool", path=Path(sys.executable).parent)
    assert program, "there is no promtool: scripts/setup.sh brings it"
    return run_program(program, *arguments)


def test_prometheus_takes_the_rules():
    checked = promtool("check", "rules", RULES)
    assert checked.returncode == 0, checked.stderr
    assert f"{len(GROUP['rules'])} rules found" in checked.stdout


@pytest.mark.long
def test_each_fires_when_it_must_and_not_short_of_it():
    told = promtool("test", "rules", TESTS)
    assert told.returncode == 0, told.stdout + told.stderr


def test_what_has_been_counted_is_told_in_whole_numbers(tmp_path):
    """`increase` of one page is 1.07 pages, unless it is told just when rules are looked at."""
    test = """
rule_files: [rules.yaml]
evaluation_interval: 1m
tests:
  - interval: 70s
    input_series: [{series: 'hicache_storage_damaged_pages_total{driver="file",pool="kv"}', values: '0x10 1x10'}]
    alert_rule_test: [{alertname: HiCacheDamagedPages, eval_time: 20m, exp_alerts: []}]
"""
    (tmp_path / "rules.yaml").write_text(RULES.read_text())
    (tmp_path / "tests.yaml").write_text(test)
    told = promtool("test", "rules", tmp_path / "tests.yaml")
    assert "file has found 1 pages of kv with wrong bytes." in told.stdout + told.stderr
