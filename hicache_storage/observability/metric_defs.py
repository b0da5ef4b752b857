"""Definitions of the SDK's metrics: names, types, units and labels.

Label values are bounded: `driver` and `operation` are the SDK's own words, `pool` is a pool that the
engine has registered. No label contains a key, a request or a client.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Final

from hicache_storage.spec.stats import LATENCY_BOUNDS_SECONDS, MissReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache_storage.spec.stats import StorageStats


class MetricKind(StrEnum):
    """Types of metrics, as Prometheus names them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as it is exported.

    Names follow OpenMetrics: base units, and `_total` at the end of counters alone.
    """

    name: str
    """Name of the series; those of a histogram append `_bucket`, `_count` and `_sum`."""
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, without infinity."""
    source: str = ""
    """Field of the statistics that the metric exports."""
    tag: tuple[str, str] = ("", "")
    """Label and value that stand for `source`, where several fields share a metric."""

    @property
    def family(self) -> str:
        """The name without `_total`, which `prometheus_client` appends to counters."""
        return self.name.removesuffix("_total")


def _scalar(
    kind: MetricKind,
    name: str,
    text: str,
    *labels: str,
    source: str = "",
    tag: tuple[str, str] = ("", ""),
) -> Metric:
    return Metric(name, kind, text, labels, source=source, tag=tag)


counter: Final = partial(_scalar, MetricKind.COUNTER)
gauge: Final = partial(_scalar, MetricKind.GAUGE)


def _counter_of(
    component: str, labels: tuple[str, ...], name: str, text: str, source: str
) -> Metric:
    return counter(f"hicache_{component}_{name}_total", text, *labels, source=source)


_storage: Final = partial(_counter_of, "storage", ("driver",))
_pool: Final = partial(_counter_of, "storage", ("driver", "pool"))
_pool_by_reason: Final = partial(_counter_of, "storage", ("driver", "pool", "reason"))
_controller: Final = partial(_counter_of, "controller", ())
_cache: Final = partial(_counter_of, "cache", ())
_REASONS: Final = ", ".join(MissReason)


CALL_SECONDS: Final = Metric(
    "hicache_storage_call_seconds",
    MetricKind.HISTOGRAM,
    "Duration of calls of the driver, by operation: exists, get or set.",
    ("driver", "pool", "operation"),
    # The bounds of `spec.stats.Latency`, whose counts are exported as they are.
    LATENCY_BOUNDS_SECONDS,
)
BREAKER_OPEN: Final = gauge(
    "hicache_storage_breaker_open",
    "1 while the circuit breaker of a kind of operation (read, write, delete) refuses calls, or lets "
    "a single one try.",
    "driver",
    "operation",
)
CHECKSUMS_OFF: Final = gauge(
    "hicache_storage_checksums_off",
    "1 where the operator has turned the verification of checksums off.",
    "driver",
)


def _by_label(
    make: Callable[..., Metric], name: str, text: str, label: str, **sources: str
) -> list[Metric]:
    """Define a metric whose label tells several fields apart: fields by the label's value."""
    return [
        make(name, text, label, source=source, tag=(label, value))
        for value, source in sources.items()
    ]


STORAGE: Final = (
    _pool("read_pages", "Pages that a get has delivered.", "pages_read"),
    _pool("read_bytes", "Bytes that a get has delivered.", "bytes_read"),
    _pool(
        "written_pages",
        "Pages that a set has stored; those that were there already do not count.",
        "pages_written",
    ),
    _pool("written_bytes", "Bytes of the pages that a set has stored.", "bytes_written"),
    _pool("hit_pages", "Pages that an exists has found.", "pages_hit"),
    _pool_by_reason(
        "absent_pages",
        f"Pages that an exists has asked for and not found, by reason: {_REASONS}.",
        "absent",
    ),
    _pool_by_reason(
        "missed_pages",
        "Pages that a get was asked for and has not delivered, by the same reasons.",
        "missed",
    ),
    _pool(
        "damaged_pages",
        "Pages that a get has found damaged: length, envelope or checksum did not fit.",
        "pages_damaged",
    ),
    _pool(
        "refused_pages",
        "Pages that a set was given and has not stored: no room, too large, deadline, fault.",
        "pages_refused",
    ),
    _pool("evicted_pages", "Pages that this storage has evicted.", "pages_evicted"),
    CALL_SECONDS,
    _storage(
        "faults", "Calls of the driver that have failed and were turned into misses.", "faults"
    ),
    _storage(
        "missed_deadlines", "Of those, the ones that did not come back in time.", "deadlines_missed"
    ),
    _storage(
        "breaker_refusals",
        "Calls answered as misses by an open circuit breaker.",
        "breaker_refusals",
    ),
    _storage(
        "failovers", "Metadata servers that have failed and were left for another.", "failovers"
    ),
    BREAKER_OPEN,
    CHECKSUMS_OFF,
)
"""Of each storage: `hicache_storage.observability.prometheus.StorageCollector`."""
CONTROLLER: Final = (
    _controller(
        "written_back_tokens", "Tokens copied from the device to the host.", "tokens_written_back"
    ),
    _controller("loaded_tokens", "Tokens copied from the host to the device.", "tokens_loaded"),
    *_by_label(
        counter,
        "hicache_controller_copies_without_room_total",
        "Copies declined for want of room, by direction: write (to the host) or load (to the "
        "device).",
        "direction",
        write="writes_without_room",
        load="loads_without_room",
    ),
    # One metric with a label: the outcomes add up to all prefetches that were asked for.
    *_by_label(
        counter,
        "hicache_controller_prefetches_total",
        "Prefetches by what became of them: begun, below_threshold (too short) or rate_limited.",
        "outcome",
        begun="prefetches",
        below_threshold="prefetches_below_threshold",
        rate_limited="prefetches_rate_limited",
    ),
    _controller(
        "prefetched_tokens",
        "Tokens that prefetches have delivered to the cache.",
        "tokens_prefetched",
    ),
    _controller(
        "hit_tokens",
        "Tokens of the longest prefixes that all ranks could restore from storage.",
        "tokens_hit",
    ),
    _controller(
        "cut_tokens", "Of those, the ones left out for want of host memory.", "tokens_without_room"
    ),
    _controller(
        "backed_up_pages",
        "Pages of all pools that are in storage: stored by this rank, found there, or another rank's "
        "to write.",
        "pages_backed_up",
    ),
    _controller(
        "dropped_pages",
        "Pages of all pools whose backup was given up after the last attempt.",
        "pages_dropped",
    ),
    _controller("backup_retries", "Backups tried once more.", "backup_retries"),
    _controller(
        "storage_errors",
        "Calls of the storage that have raised; the contract forbids it.",
        "storage_errors",
    ),
    _controller("invalid_answers", "Answers of the storage that are none.", "invalid_answers"),
    _controller(
        "abandoned_calls", "Calls of the storage that were left behind.", "abandoned_calls"
    ),
    gauge(
        "hicache_controller_stuck_calls",
        "Of those, the ones that have not come back yet.",
        source="stuck_calls",
    ),
)
"""Of each hybrid controller: `hicache_storage.observability.prometheus.SnapshotCollector`."""
CACHE: Final = (
    *_by_label(
        gauge,
        "hicache_cache_tokens",
        "Tokens whose KV a tier holds.",
        "tier",
        device="device_tokens",
        host="host_tokens",
    ),
    *_by_label(
        gauge,
        "hicache_cache_states",
        "Recurrent states that a tier holds.",
        "tier",
        device="device_states",
        host="host_states",
    ),
    gauge(
        "hicache_cache_evictable_tokens",
        "Tokens on the device that no request holds.",
        source="evictable_tokens",
    ),
    gauge(
        "hicache_cache_evictable_states",
        "Recurrent states on the device that no request holds.",
        source="evictable_states",
    ),
    gauge("hicache_cache_locks", "Prefixes that requests hold.", source="locks"),
    _cache(
        "declined_writes", "Nodes not copied to the host for want of room there.", "declined_writes"
    ),
    _cache(
        "dropped_tokens",
        "Tokens fetched from storage in vain: what was before them was evicted meanwhile, or there was "
        "no room.",
        "dropped_tokens",
    ),
    _cache(
        "tokens_stored_again",
        "Tokens handed to the storage a second time, as it had lost them while they were cached.",
        "tokens_stored_again",
    ),
)
"""Of each radix cache: `hicache_storage.observability.prometheus.SnapshotCollector`."""


def storage_samples(stats: StorageStats) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
    """Yield each sample of `STORAGE` but durations: metric, values of its labels, and value."""
    for metric in STORAGE:
        if metric is BREAKER_OPEN:
            for operation, state in stats.breaker_states.items():
                # Half-open counts as open: it lets a single call through and refuses the others.
                yield metric, (stats.driver, operation), float(state != "closed")
        elif metric is CHECKSUMS_OFF:
            yield metric, (stats.driver,), float(not stats.verifies_checksums)
        elif metric is not CALL_SECONDS and "pool" not in metric.labels:
            yield metric, (stats.driver,), float(getattr(stats, metric.source))
        elif metric is not CALL_SECONDS:
            for name, pool in stats.pools.items():
                # A plain text: vLLM refuses to send subclasses to its API server.
                labels, value = (stats.driver, str(name)), getattr(pool, metric.source)
                if "reason" not in metric.labels:
                    yield metric, labels, float(value)
                    continue
                # All of them: Prometheus does not see the first value of a new series as an
                # increase.
                for reason in MissReason:
                    yield metric, (*labels, str(reason)), float(value[reason])
