"""Defined metrics by the component that exports them, each name once."""

from __future__ import annotations

from prometheus_client import PROCESS_COLLECTOR

from hicache_metadata_server import metric_defs
from hicache_storage.observability import metric_defs as v
from hicache_storage.observability.metric_defs import Metric, MetricKind

SERVER = [metric for metric in vars(metric_defs).values() if isinstance(metric, Metric)]
PROCESS = [
    Metric(
        family.name + "_total" * (family.type == "counter"),
        MetricKind(family.type),
        family.documentation,
    )
    for family in PROCESS_COLLECTOR.collect()
]
"""As prometheus_client has them."""
COMPONENTS = {
    component: {metric.name: metric for metric in metrics}
    for component, metrics in {
        "storage": v.STORAGE,
        "controller": v.CONTROLLER,
        "cache": v.CACHE,
        "server": SERVER,
        "process": PROCESS,
    }.items()
}


def series(metric):
    """Names of a metric's series on a Prometheus server."""
    if metric.kind is MetricKind.HISTOGRAM:
        return [metric.name + suffix for suffix in ("_bucket", "_count", "_sum")]
    return [metric.name]
