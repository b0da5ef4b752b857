"""Definitions of all metrics: names, types, units and labels.

Label values are bounded:

- `driver` and `operation` are the SDK's own words, `pool` is a pool that the engine has registered.
- `route` is a route of the protocol, never a requested path.
- `tenant` is a tenant that the operator has named.
- `scope` is one of the first `MAX_SCOPE_SERIES` scopes of a server process; all others are summed
  under `OTHER_SCOPES`.
- `model` is the name that a client has given to one of these scopes: one line of at most 512
  characters.

No label contains a key, a request or a client.
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

MAX_SCOPE_SERIES: Final = 512
"""Limit of scopes with series of their own, for each server process."""
OTHER_SCOPES: Final = "other"
"""Label of all further scopes.

No scope has this name, because names of scopes begin with a rank.
"""

REQUEST_BOUNDS_SECONDS: Final = (
    2e-4,
    5e-4,
    1e-3,
    2e-3,
    5e-3,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1.0,
    5.0,
)


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


_counter: Final = partial(_scalar, MetricKind.COUNTER)
_gauge: Final = partial(_scalar, MetricKind.GAUGE)


def _pool(name: str, text: str, source: str, label: str = "") -> Metric:
    labels = ("driver", "pool", label) if label else ("driver", "pool")
    return _counter(f"hicache_storage_{name}_total", text, *labels, source=source)


_REASONS: Final = ", ".join(MissReason)


CALL_SECONDS: Final = Metric(
    "hicache_storage_call_seconds",
    MetricKind.HISTOGRAM,
    "Duration of calls of the driver, by operation: exists, get or set.",
    ("driver", "pool", "operation"),
    # The bounds of `spec.stats.Latency`, whose counts are exported as they are.
    LATENCY_BOUNDS_SECONDS,
)
BREAKER_OPEN: Final = _gauge(
    "hicache_storage_breaker_open",
    "1 while the circuit breaker of a kind of operation (read, write, delete) refuses calls, or lets "
    "a single one try.",
    "driver",
    "operation",
)
CHECKSUMS_OFF: Final = _gauge(
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


REQUESTS: Final = _counter(
    "hicache_metadata_requests_total", "Requests answered.", "route", "status"
)
REQUEST_SECONDS: Final = Metric(
    "hicache_metadata_request_seconds",
    MetricKind.HISTOGRAM,
    "From the last byte of a request to its answer.",
    ("route",),
    REQUEST_BOUNDS_SECONDS,
)
SLOTS: Final = _gauge(
    "hicache_metadata_slots",
    "Slots by state: free, leased, live or quarantined.",
    "scope",
    "state",
)
SCOPE_EVICTED_PAGES: Final = _counter(
    "hicache_metadata_evicted_pages_total",
    "Pages evicted to make room.",
    "scope",
    source="evicted",
)
LOOKED_UP_KEYS: Final = _counter(
    "hicache_metadata_lookup_keys_total",
    "Keys that clients have asked for, by whether they were live: hit or miss.",
    "scope",
    "result",
)
EXPIRED_LEASES: Final = _counter(
    "hicache_metadata_expired_leases_total",
    "Leases that were neither committed nor given back in time: their writers are dead or slow.",
    "scope",
    source="expired_leases",
)
SCOPE_INFO: Final = _gauge(
    "hicache_metadata_scope_info",
    "Always 1; the model whose pages a scope holds, where a client has named it.",
    "scope",
    "model",
)
SCOPE_OWNER: Final = _gauge(
    "hicache_metadata_scope_owner",
    "Always 1; the address of the server that owns a scope, where several share a Redis.",
    "scope",
    "owner",
)
SCOPE_LOG_BYTES: Final = _gauge(
    "hicache_metadata_scope_log_bytes",
    "Length of a scope's log in Redis, which its next owner replays.",
    "scope",
)
UNOWNED_SCOPES: Final = _gauge(
    "hicache_metadata_unowned_scopes",
    "Scopes in Redis that no server owns, as this server knows it; requests about them are refused.",
)
QUARANTINE_SECONDS: Final = _gauge(
    "hicache_metadata_quarantine_seconds",
    "How long a slot stays in quarantine before it is used again.",
)
READY: Final = _gauge("hicache_metadata_ready", "1 while the server is ready, as /readyz says it.")
DRAINING: Final = _gauge("hicache_metadata_draining", "1 while no new leases are given.")
RECOVERY_PROBLEMS: Final = _gauge(
    "hicache_metadata_recovery_problems",
    "Contradictions in the store that the last start has left out.",
)
TRANSACTIONS: Final = _counter(
    "hicache_metadata_transactions_total", "Groups of changes written to the store."
)
TRANSACTION_SECONDS: Final = Metric(
    "hicache_metadata_transaction_seconds",
    MetricKind.HISTOGRAM,
    "How long a group took to write.",
    (),
    LATENCY_BOUNDS_SECONDS,
)
STORE_FAILING: Final = _gauge(
    "hicache_metadata_store_failing",
    "1 while the store cannot be written, or a shared one does not answer or takes no writes.",
)
STORE_BYTES: Final = _gauge(
    "hicache_metadata_store_bytes",
    "Size of a SQLite store's files, by part: database or wal (SQLite's own log); in Redis, log: "
    "that of the scopes that this server owns.",
    "part",
)
BUILD_INFO: Final = _gauge(
    "hicache_metadata_build_info",
    "Always 1; the server's version, its protocol, and the version of Python.",
    "version",
    "protocol",
    "python",
)
TOKENS: Final = _gauge(
    "hicache_metadata_tokens", "Tokens that are known, by whether they have expired.", "state"
)
NEXT_TOKEN_EXPIRY: Final = _gauge(
    "hicache_metadata_next_token_expiry_timestamp_seconds",
    "When the next token expires, since unix epoch in seconds.",
)
RELOADS: Final = _counter(
    "hicache_metadata_reloads_total",
    "Times a file of tokens, tenants or certificates was taken, the first included.",
    "what",
)
RELOAD_FAILING: Final = _gauge(
    "hicache_metadata_reload_failing",
    "1 while a file of the server cannot be used: what it held before stays in force.",
    "what",
)
TENANT_HOLDS: Final = _gauge(
    "hicache_metadata_tenant_holds",
    "What a tenant holds: scopes, slots or bytes.",
    "tenant",
    "what",
)
TENANT_QUOTA: Final = _gauge(
    "hicache_metadata_tenant_quota",
    "The tenant's quota: scopes, slots or bytes.",
    "tenant",
    "what",
)

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
    _pool(
        "absent_pages",
        f"Pages that an exists has asked for and not found, by reason: {_REASONS}.",
        "absent",
        label="reason",
    ),
    _pool(
        "missed_pages",
        "Pages that a get was asked for and has not delivered, by the same reasons.",
        "missed",
        label="reason",
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
    _counter(
        "hicache_storage_faults_total",
        "Calls of the driver that have failed and were turned into misses.",
        "driver",
        source="faults",
    ),
    _counter(
        "hicache_storage_missed_deadlines_total",
        "Of those, the ones that did not come back in time.",
        "driver",
        source="deadlines_missed",
    ),
    _counter(
        "hicache_storage_breaker_refusals_total",
        "Calls answered as misses by an open circuit breaker.",
        "driver",
        source="breaker_refusals",
    ),
    _counter(
        "hicache_storage_failovers_total",
        "Metadata servers that have failed and were left for another.",
        "driver",
        source="failovers",
    ),
    BREAKER_OPEN,
    CHECKSUMS_OFF,
)
"""Of each storage: `hicache_storage.observability.prometheus.StorageCollector`."""
CONTROLLER: Final = (
    _counter(
        "hicache_controller_written_back_tokens_total",
        "Tokens copied from the device to the host.",
        source="tokens_written_back",
    ),
    _counter(
        "hicache_controller_loaded_tokens_total",
        "Tokens copied from the host to the device.",
        source="tokens_loaded",
    ),
    *_by_label(
        _counter,
        "hicache_controller_copies_without_room_total",
        "Copies declined for want of room, by direction: write (to the host) or load (to the "
        "device).",
        "direction",
        write="writes_without_room",
        load="loads_without_room",
    ),
    # One metric with a label: the outcomes add up to all prefetches that were asked for.
    *_by_label(
        _counter,
        "hicache_controller_prefetches_total",
        "Prefetches by what became of them: begun, below_threshold (too short) or rate_limited.",
        "outcome",
        begun="prefetches",
        below_threshold="prefetches_below_threshold",
        rate_limited="prefetches_rate_limited",
    ),
    _counter(
        "hicache_controller_prefetched_tokens_total",
        "Tokens that prefetches have delivered to the cache.",
        source="tokens_prefetched",
    ),
    _counter(
        "hicache_controller_hit_tokens_total",
        "Tokens of the longest prefixes that all ranks could restore from storage.",
        source="tokens_hit",
    ),
    _counter(
        "hicache_controller_cut_tokens_total",
        "Of those, the ones left out for want of host memory.",
        source="tokens_without_room",
    ),
    _counter(
        "hicache_controller_backed_up_pages_total",
        "Pages of all pools that are in storage: stored by this rank, found there, or another rank's "
        "to write.",
        source="pages_backed_up",
    ),
    _counter(
        "hicache_controller_dropped_pages_total",
        "Pages of all pools whose backup was given up after the last attempt.",
        source="pages_dropped",
    ),
    _counter(
        "hicache_controller_backup_retries_total",
        "Backups tried once more.",
        source="backup_retries",
    ),
    _counter(
        "hicache_controller_storage_errors_total",
        "Calls of the storage that have raised; the contract forbids it.",
        source="storage_errors",
    ),
    _counter(
        "hicache_controller_invalid_answers_total",
        "Answers of the storage that are none.",
        source="invalid_answers",
    ),
    _counter(
        "hicache_controller_abandoned_calls_total",
        "Calls of the storage that were left behind.",
        source="abandoned_calls",
    ),
    _gauge(
        "hicache_controller_stuck_calls",
        "Of those, the ones that have not come back yet.",
        source="stuck_calls",
    ),
)
"""Of each hybrid controller: `hicache_storage.observability.prometheus.ControllerCollector`."""
CACHE: Final = (
    *_by_label(
        _gauge,
        "hicache_cache_tokens",
        "Tokens whose KV a tier holds.",
        "tier",
        device="device_tokens",
        host="host_tokens",
    ),
    *_by_label(
        _gauge,
        "hicache_cache_states",
        "Recurrent states that a tier holds.",
        "tier",
        device="device_states",
        host="host_states",
    ),
    _gauge(
        "hicache_cache_evictable_tokens",
        "Tokens on the device that no request holds.",
        source="evictable_tokens",
    ),
    _gauge(
        "hicache_cache_evictable_states",
        "Recurrent states on the device that no request holds.",
        source="evictable_states",
    ),
    _gauge("hicache_cache_locks", "Prefixes that requests hold.", source="locks"),
    _counter(
        "hicache_cache_declined_writes_total",
        "Nodes not copied to the host for want of room there.",
        source="declined_writes",
    ),
    _counter(
        "hicache_cache_dropped_tokens_total",
        "Tokens fetched from storage in vain: what was before them was evicted meanwhile, or there was "
        "no room.",
        source="dropped_tokens",
    ),
    _counter(
        "hicache_cache_tokens_stored_again_total",
        "Tokens handed to the storage a second time, as it had lost them while they were cached.",
        source="tokens_stored_again",
    ),
)
"""Of each radix cache: `hicache_storage.observability.prometheus.CacheCollector`."""


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
