"""Files generated from the metric definitions.

Dashboard, alert rules, and the tables of `docs/observability.md`.
"""

from hicache_storage.tools.metrics.alerts import ALERTS, Alert, rules
from hicache_storage.tools.metrics.dashboard import dashboard
from hicache_storage.tools.metrics.documents import (
    alert_sections,
    metric_table,
    with_generated_parts,
)

__all__ = [
    "ALERTS",
    "Alert",
    "alert_sections",
    "dashboard",
    "metric_table",
    "rules",
    "with_generated_parts",
]
