"""A dashboard for Grafana: an overview, then a panel for every metric."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hicache_storage.observability import metric_defs as v
from hicache_storage.observability.metric import MetricKind
from hicache_storage.tools.metrics.queries import now, quantile, rate, selected, share

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.observability.metric import Metric

JOB: Final = 'job=~"$job"'
WINDOW: Final = "$__rate_interval"
SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT, COLUMNS = 8, 7, 3
UNITS: Final[Mapping[str, str]] = {"bytes": "bytes", "seconds": "s", "": "short"}
RATES: Final[Mapping[str, str]] = {"bytes": "Bps", "seconds": "s", "": "cps"}
ROWS: Final[Mapping[str, str]] = {
    "storage": "Drivers",
    "controller": "Hybrid controller",
    "cache": "Radix cache",
    "server": "Metadata server",
    "process": "Metadata server: process",
}


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph of some series, each with its legend."""

    title: str
    series: Mapping[str, str]
    """Expression by legend."""
    unit: str
    description: str = ""


def dashboard() -> str:
    """Render the dashboard as JSON for import into Grafana."""
    panels, y = list[dict[str, object]](), 0
    sections = {"Overview": _overview()} | {
        ROWS[component]: [_panel(metric) for metric in v.metrics_of(component).values()]
        for component in v.COMPONENTS
    }
    for title, graphs in sections.items():
        panels.append(
            {
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": _place(y, 0, 24, 1),
            }
        )
        y += 1
        for number, graph in enumerate(graphs):
            row, column = divmod(number, COLUMNS)
            panels.append(_graph(graph, _place(y + row * HEIGHT, column * WIDTH, WIDTH, HEIGHT)))
        y += -(-len(graphs) // COLUMNS) * HEIGHT
    # Numbered at the end: Grafana wants ids that differ, and rows are panels, too.
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    board = {
        "title": "HiCache storage",
        "uid": "hicache-storage",
        "description": "Made by `make metrics` out of the declared metrics.",
        "tags": ["hicache"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }
    return json.dumps(board, indent=1) + "\n"


def _overview() -> list[Panel]:
    """Panels of the cache's benefit, and of failures."""
    by = ("driver", "pool")
    # Everything that is not free, as quarantined and leased slots cannot be taken either.
    used, every = (
        now(v.SLOTS, JOB, 'state!="free"', by=("scope",)),
        now(v.SLOTS, JOB, by=("scope",)),
    )
    full = f"topk(5, {used} / {every})"
    hits = share(rate(v.HIT_PAGES, WINDOW, JOB, by=by), rate(v.ABSENT_PAGES, WINDOW, JOB, by=by))
    live, missing = (
        rate(v.LOOKED_UP_KEYS, WINDOW, JOB, f'result="{result}"', by=("scope",))
        for result in ("hit", "miss")
    )
    moved = {
        f"{word} {{{{driver}}}}": rate(metric, WINDOW, JOB, by=("driver",))
        for word, metric in (("read", v.READ_BYTES), ("written", v.WRITTEN_BYTES))
    }
    wrong = {
        f"{metric.family.removeprefix('hicache_storage_')} {{{{driver}}}}": rate(
            metric, WINDOW, JOB, by=("driver",)
        )
        for metric in (
            v.FAULTS,
            v.MISSED_DEADLINES,
            v.BREAKER_REFUSALS,
            v.FAILOVERS,
            v.DAMAGED_PAGES,
        )
    }
    conditions = {
        f"{metric.name.removeprefix('hicache_metadata_')} {{{{instance}}}}": selected(metric, JOB)
        for metric in (v.READY, v.DRAINING, v.STORE_FAILING, v.RECOVERY_PROBLEMS)
    }
    slots = now(v.SLOTS, JOB, by=("state",))
    return [
        Panel(
            "Hit ratio of drivers",
            {"{{driver}} {{pool}}": hits},
            "percentunit",
            "Pages found of those that an exists asked for.",
        ),
        Panel(
            "Hit ratio of scopes",
            {"{{scope}}": share(live, missing)},
            "percentunit",
            "Of the metadata server's lookups.",
        ),
        Panel("Bytes moved", moved, "Bps"),
        Panel(
            "Calls of drivers, 99th percentile",
            {
                "{{driver}} {{operation}}": quantile(
                    0.99, v.CALL_SECONDS, WINDOW, JOB, by=("driver", "operation")
                )
            },
            "s",
        ),
        Panel(
            "Requests to the metadata server, 99th percentile",
            {"{{route}}": quantile(0.99, v.REQUEST_SECONDS, WINDOW, JOB, by=("route",))},
            "s",
        ),
        Panel("What goes wrong", wrong, "cps"),
        Panel("Slots by state", {"{{state}}": slots}, "short"),
        Panel(
            "Fullest scopes",
            {"{{scope}}": full},
            "percentunit",
            "Slots that are not free, of the five scopes that have most of them: one scope can be "
            "full while all together are nearly empty.",
        ),
        Panel(
            "Requests by status",
            {"{{status}}": rate(v.REQUESTS, WINDOW, JOB, by=("status",))},
            "reqps",
        ),
        Panel("State of servers", conditions, "short"),
    ]


def _panel(metric: Metric) -> Panel:
    """Make the panel of one metric."""
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels) or "{{instance}}"
    by = metric.labels or ("instance",)
    title = metric.family.removeprefix("hicache_").replace("_", " ")
    if metric.kind is MetricKind.COUNTER:
        return Panel(
            title,
            {legend: rate(metric, WINDOW, JOB, by=by)},
            RATES[metric.unit],
            f"{metric.name}: {metric.help}",
        )
    if metric.kind is MetricKind.GAUGE and metric.name.endswith("_timestamp_seconds"):
        # The first date of several; a sum or an average of dates means nothing.
        series = {legend: f"min by ({', '.join(by)}) ({selected(metric, JOB)})"}
        return Panel(title, series, UNITS[metric.unit], f"{metric.name}: {metric.help}")
    if metric.kind is MetricKind.GAUGE:
        return Panel(
            title,
            {legend: now(metric, JOB, by=by)},
            UNITS[metric.unit],
            f"{metric.name}: {metric.help}",
        )
    series = {
        f"p{percent} {legend}": quantile(percent / 100, metric, WINDOW, JOB, by=by)
        for percent in (50, 99)
    }
    return Panel(title, series, UNITS[metric.unit], f"{metric.name}: {metric.help}")


def _graph(panel: Panel, place: dict[str, int]) -> dict[str, object]:
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": SOURCE,
            "expr": expression,
            "legendFormat": legend,
        }
        for number, (legend, expression) in enumerate(panel.series.items())
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets,
    }


def _place(y: int, x: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _variables() -> list[dict[str, object]]:
    """Return the variables of the dashboard: data source, and scrape jobs."""
    jobs = 'label_values({__name__=~"hicache_.+"}, job)'
    return [
        {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "job",
            "label": "Job",
            "type": "query",
            "datasource": SOURCE,
            "definition": jobs,
            "query": {"query": jobs, "refId": "job"},
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            # Also jobs that appear later; without it, Grafana lists those that it knows now.
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]
