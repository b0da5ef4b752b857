"""The files generated from the metric definitions are up to date, and Prometheus and Grafana can
read them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml

from hicache_metadata_server.protocol import MAX_SPARE_SHARE
from hicache_storage.observability import metric_defs as v
from hicache_storage.tools.metrics import ALERTS, dashboard, rules, with_generated_parts
from hicache_storage.tools.metrics.alerts import SPARE_SHARE
from hicache_storage.tools.metrics.queries import rate, selected
from tests.support.commands import run_hicache

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "observability.md"
RULES_TEST = ROOT / "tests" / "observability" / "alert_rules.yaml"
BY_SERIES = {
    series: metric
    for component in v.COMPONENTS
    for metric in v.metrics_of(component).values()
    for series in metric.series
}
OF_TARGETS = {"instance", "job", "le"}
"""Labels that Prometheus adds, and that of buckets."""


def panels():
    return [panel for panel in json.loads(dashboard())["panels"] if panel["type"] != "row"]


def expressions():
    yield from ((alert.name, alert.expr) for alert in ALERTS)
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


def test_the_files_are_in_step():
    """`make metrics` makes them anew."""
    assert (ROOT / "deploy" / "grafana-dashboard.json").read_text() == dashboard()
    assert (ROOT / "deploy" / "prometheus-alerts.yaml").read_text() == rules()
    assert PAGE.read_text() == with_generated_parts(PAGE.read_text())


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


def test_the_check_of_expressions_finds_what_is_wrong():
    [selector] = [
        n
        for n in parts(promql_parser.parse('sum by (x) (rate(nonesuch{y="1"}[5m]))'))
        if hasattr(n, "matchers")
    ]
    assert (selector.name, labels_of(selector)) == ("nonesuch", {"y"})
    assert selector.name not in BY_SERIES
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        promql_parser.parse("sum by (x (y)")
    with pytest.raises(ValueError, match="no label 'key'"):
        selected(v.SLOTS, 'key="a"')
    with pytest.raises(AssertionError):
        rate(v.SLOTS, "5m")


def test_every_metric_is_on_the_dashboard():
    shown = {
        node.name
        for panel in panels()
        for target in panel["targets"]
        for node in parts(promql_parser.parse(target["expr"].replace("$__rate_interval", "5m")))
        if isinstance(node, promql_parser.VectorSelector)
    }
    missing = {metric.name for metric in BY_SERIES.values() if not shown & set(metric.series)}
    assert not missing


def test_panels_do_not_overlap_and_have_numbers_of_their_own():
    board = json.loads(dashboard())["panels"]
    assert [panel["id"] for panel in board] == list(range(1, len(board) + 1))
    taken = set()
    for panel in board:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_rules_file_is_what_the_rules_are():
    [group] = yaml.safe_load(rules())["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [alert.name for alert in ALERTS]
    for rule, alert in zip(group["rules"], ALERTS, strict=True):
        assert (rule["expr"], rule["for"], rule["labels"]) == (
            alert.expr,
            alert.lasts,
            {"severity": alert.severity},
        )
        assert re.fullmatch(r"\d+m", rule["for"])


def test_every_alert_leads_to_a_section_that_says_what_to_do():
    sections = dict(
        re.findall(
            r"^### (HiCache\w+)\n(.*?)(?=^#|\Z|<!--)", PAGE.read_text(), re.MULTILINE | re.DOTALL
        )
    )
    assert set(sections) == {alert.name for alert in ALERTS}
    for rule, alert in zip(yaml.safe_load(rules())["groups"][0]["rules"], ALERTS, strict=True):
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert "runbook_url" not in rule["annotations"], "a path is no URL"
        assert (ROOT / page).exists()
        assert anchor == alert.name.lower()
        assert alert.do in sections[alert.name]


def test_links_within_the_page_lead_somewhere():
    text = PAGE.read_text()
    anchors = {
        re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) <= anchors


def test_labels_in_summaries_are_those_of_the_expression():
    for alert in ALERTS:
        nodes = list(parts(promql_parser.parse(alert.expr), scalars=False))
        aggregated = [
            labels_of(node) for node in nodes if isinstance(node, promql_parser.AggregateExpr)
        ]
        kept = set.intersection(*aggregated) if aggregated else None
        for label in re.findall(r"\$labels\.(\w+)", alert.summary):
            assert kept is None or label in kept, f"{alert.name} loses {label}"


def test_every_alert_is_tried_by_make_alerts():
    tried = set(re.findall(r'alertname="(\w+)"', RULES_TEST.read_text()))
    assert tried == {alert.name for alert in ALERTS}


def test_the_alert_of_slots_in_quarantine_fires_at_half_of_the_servers_limit():
    assert 2 * MAX_SPARE_SHARE == SPARE_SHARE


def test_the_command(tmp_path):
    listed = run_hicache("metrics", "list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == [
        name for component in v.COMPONENTS for name in v.metrics_of(component)
    ]
    done = run_hicache("metrics", "dashboard", "--output", tmp_path / "d.json")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "d.json").read_text() == dashboard()
    assert run_hicache("metrics", "alerts").stdout == rules()
