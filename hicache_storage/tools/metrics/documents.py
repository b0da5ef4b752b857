"""Generated parts of `docs/observability.md`: tables of metrics and alerts."""

from __future__ import annotations

import re
from typing import Final

from hicache_storage.observability import metric_defs as v
from hicache_storage.tools.metrics.alerts import ALERTS

EXPORTERS: Final = {
    "storage": "Drivers: `hicache_storage.observability.prometheus.StorageCollector`",
    "controller": "Hybrid controller: "
    "`hicache_storage.observability.prometheus.ControllerCollector`",
    "cache": "Radix cache: `hicache_storage.observability.prometheus.CacheCollector`",
    "server": "Metadata server: `GET /metrics`",
    "process": "Metadata server's process: `GET /metrics`, on Linux",
}
_PART: Final = re.compile(r"(<!-- made by `make metrics`: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def metric_table() -> str:
    """A table for each component."""
    parts = list[str]()
    for component, title in EXPORTERS.items():
        parts += [f"### {title}\n", "| metric | kind | labels | |", "|---|---|---|---|"]
        for metric in v.metrics_of(component).values():
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            parts.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
        parts.append("")
    return "\n".join(parts)


def alert_sections() -> str:
    """Render a section for each alert."""
    parts = list[str]()
    for alert in ALERTS:
        lasts = f"for {alert.lasts}" if alert.lasts != "0m" else "at once"
        parts += [
            f"### {alert.name}\n",
            f"{alert.severity.capitalize()}, {lasts}: `{alert.expr}`\n",
            f"{alert.means}\n",
            f"**Do:** {alert.do}\n",
        ]
    return "\n".join(parts)


def with_generated_parts(page: str) -> str:
    """Regenerate the generated parts of a page.

    Raises:
        KeyError: the page has a part of an unknown name.
    """
    made = {"metrics": metric_table, "alerts": alert_sections}
    return _PART.sub(lambda match: f"{match[1]}\n{made[match[2]]()}\n{match[3]}", page)
