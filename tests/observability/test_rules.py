"""Alert rules, tried by Prometheus' own tool; names in rules, dashboard and page are exported ones."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import promql_parser
import pytest
import yaml

from hicache_metadata_server.protocol import MAX_SPARE_SHARE
from tests.observability.components import COMPONENTS, series
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


PAGE = ROOT / "docs" / "observability.md"
DASHBOARD = ROOT / "deploy" / "grafana-dashboard.json"
BY_SERIES = {
    name: metric
    for metrics in COMPONENTS.values()
    for metric in metrics.values()
    for name in series(metric)
}
OF_TARGETS = {"instance", "job", "le"}
"""Labels that Prometheus adds, and that of buckets."""


def panels():
    return [
        panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"
    ]


def expressions():
    yield from ((rule["alert"], rule["expr"]) for rule in GROUP["rules"])
    for panel in panels():
        yield from (
            (panel["title"], target["expr"].replace("$__rate_interval", "5m"))
            for target in panel["targets"]
        )


def parts(node, *, scalars=True):
    """All nodes of an expression; without those whose labels do not reach it, if told so."""
    if not scalars and isinstance(node, promql_parser.Call) and node.func.name == "scalar":
        return
    yield node
    for name in ("expr", "lhs", "rhs", "args", "vector_selector", "param"):
        child = getattr(node, name, None)
        for one in child if isinstance(child, list) else [child]:
            if isinstance(one, promql_parser.Expr):
                yield from parts(one, scalars=scalars)


def labels_of(node):
    if isinstance(node, promql_parser.AggregateExpr):
        return set(node.modifier.labels) if node.modifier else set()
    return (
        {matcher.name for matcher in node.matchers.matchers}
        if isinstance(node, promql_parser.VectorSelector)
        else set()
    )


@pytest.mark.parametrize(("name", "expression"), list(expressions()))
def test_every_expression_can_be_read_and_is_about_metrics_and_labels_that_there_are(
    name, expression
):
    nodes = list(parts(promql_parser.parse(expression)))
    selectors = [node for node in nodes if isinstance(node, promql_parser.VectorSelector)]
    assert selectors
    known = set().union(*(BY_SERIES[selector.name].labels for selector in selectors))
    for node in nodes:
        assert labels_of(node) <= known | OF_TARGETS
    for selector in selectors:
        assert {matcher.name for matcher in selector.matchers.matchers} <= {
            *BY_SERIES[selector.name].labels,
            "job",
        }


def test_every_metric_is_on_the_dashboard():
    shown = {
        node.name
        for panel in panels()
        for target in panel["targets"]
        for node in parts(promql_parser.parse(target["expr"].replace("$__rate_interval", "5m")))
        if isinstance(node, promql_parser.VectorSelector)
    }
    missing = {
        metric.name for metric in BY_SERIES.values() if not shown.intersection(series(metric))
    }
    assert not missing


def test_the_page_has_every_metric_with_its_labels_and_every_alert():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    told = {name: row for name, *row in rows}
    for component in COMPONENTS.keys() - {"process"}:
        for metric in COMPONENTS[component].values():
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            assert told[metric.name] == [labels, metric.help]
    alerts = {name: severity for name, (severity, _) in told.items() if name.startswith("HiCache")}
    assert alerts == {rule["alert"]: rule["labels"]["severity"] for rule in GROUP["rules"]}


def test_labels_in_summaries_are_those_of_the_expression():
    for rule in GROUP["rules"]:
        nodes = list(parts(promql_parser.parse(rule["expr"]), scalars=False))
        aggregated = [
            labels_of(node) for node in nodes if isinstance(node, promql_parser.AggregateExpr)
        ]
        kept = set.intersection(*aggregated) if aggregated else None
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            assert kept is None or label in kept, f"{rule['alert']} loses {label}"


def test_every_alert_is_tried_by_make_alerts():
    tried = set(re.findall(r'alertname="(\w+)"', TESTS.read_text()))
    assert tried == {rule["alert"] for rule in GROUP["rules"]}


def test_the_alert_of_slots_in_quarantine_fires_at_half_of_the_servers_limit():
    [rule] = [rule for rule in GROUP["rules"] if rule["alert"] == "HiCacheQuarantineShort"]
    assert rule["expr"].endswith(f"/ {2 * MAX_SPARE_SHARE}")
