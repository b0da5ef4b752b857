"""Definitions of the server's metrics: names, types, units and labels.

Label values are bounded:

- `route` is a route of the protocol, never a requested path.
- `tenant` is a tenant that the operator has named.
- `scope` is one of the first `MAX_SCOPE_SERIES` scopes of a server process; all others are summed
  under `OTHER_SCOPES`.
- `model` is the name that a client has given to one of these scopes: one line of at most 512
  characters.

No label contains a key, a request or a client.
"""

from __future__ import annotations

from typing import Final

from hicache_storage.observability.metric_defs import Metric, MetricKind, counter, gauge
from hicache_storage.spec.stats import LATENCY_BOUNDS_SECONDS

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

REQUESTS: Final = counter(
    "hicache_metadata_requests_total", "Requests answered.", "route", "status"
)
REQUEST_SECONDS: Final = Metric(
    "hicache_metadata_request_seconds",
    MetricKind.HISTOGRAM,
    "From the last byte of a request to its answer.",
    ("route",),
    REQUEST_BOUNDS_SECONDS,
)
SLOTS: Final = gauge(
    "hicache_metadata_slots",
    "Slots by state: free, leased, live or quarantined.",
    "scope",
    "state",
)
SCOPE_EVICTED_PAGES: Final = counter(
    "hicache_metadata_evicted_pages_total",
    "Pages evicted to make room.",
    "scope",
    source="evicted",
)
LOOKED_UP_KEYS: Final = counter(
    "hicache_metadata_lookup_keys_total",
    "Keys that clients have asked for, by whether they were live: hit or miss.",
    "scope",
    "result",
)
EXPIRED_LEASES: Final = counter(
    "hicache_metadata_expired_leases_total",
    "Leases that were neither committed nor given back in time: their writers are dead or slow.",
    "scope",
    source="expired_leases",
)
SCOPE_INFO: Final = gauge(
    "hicache_metadata_scope_info",
    "Always 1; the model whose pages a scope holds, where a client has named it.",
    "scope",
    "model",
)
SCOPE_OWNER: Final = gauge(
    "hicache_metadata_scope_owner",
    "Always 1; the address of the server that owns a scope, where several share a Redis.",
    "scope",
    "owner",
)
SCOPE_LOG_BYTES: Final = gauge(
    "hicache_metadata_scope_log_bytes",
    "Length of a scope's log in Redis, which its next owner replays.",
    "scope",
)
UNOWNED_SCOPES: Final = gauge(
    "hicache_metadata_unowned_scopes",
    "Scopes in Redis that no server owns, as this server knows it; requests about them are refused.",
)
QUARANTINE_SECONDS: Final = gauge(
    "hicache_metadata_quarantine_seconds",
    "How long a slot stays in quarantine before it is used again.",
)
READY: Final = gauge("hicache_metadata_ready", "1 while the server is ready, as /readyz says it.")
DRAINING: Final = gauge("hicache_metadata_draining", "1 while no new leases are given.")
RECOVERY_PROBLEMS: Final = gauge(
    "hicache_metadata_recovery_problems",
    "Contradictions in the store that the last start has left out.",
)
TRANSACTIONS: Final = counter(
    "hicache_metadata_transactions_total", "Groups of changes written to the store."
)
TRANSACTION_SECONDS: Final = Metric(
    "hicache_metadata_transaction_seconds",
    MetricKind.HISTOGRAM,
    "How long a group took to write.",
    (),
    LATENCY_BOUNDS_SECONDS,
)
STORE_FAILING: Final = gauge(
    "hicache_metadata_store_failing",
    "1 while the store cannot be written, or a shared one does not answer or takes no writes.",
)
STORE_BYTES: Final = gauge(
    "hicache_metadata_store_bytes",
    "Size of a SQLite store's files, by part: database or wal (SQLite's own log); in Redis, log: "
    "that of the scopes that this server owns.",
    "part",
)
BUILD_INFO: Final = gauge(
    "hicache_metadata_build_info",
    "Always 1; the server's version, its protocol, and the version of Python.",
    "version",
    "protocol",
    "python",
)
TOKENS: Final = gauge(
    "hicache_metadata_tokens", "Tokens that are known, by whether they have expired.", "state"
)
NEXT_TOKEN_EXPIRY: Final = gauge(
    "hicache_metadata_next_token_expiry_timestamp_seconds",
    "When the next token expires, since unix epoch in seconds.",
)
RELOADS: Final = counter(
    "hicache_metadata_reloads_total",
    "Times a file of tokens, tenants or certificates was taken, the first included.",
    "what",
)
RELOAD_FAILING: Final = gauge(
    "hicache_metadata_reload_failing",
    "1 while a file of the server cannot be used: what it held before stays in force.",
    "what",
)
TENANT_HOLDS: Final = gauge(
    "hicache_metadata_tenant_holds",
    "What a tenant holds: scopes, slots or bytes.",
    "tenant",
    "what",
)
TENANT_QUOTA: Final = gauge(
    "hicache_metadata_tenant_quota",
    "The tenant's quota: scopes, slots or bytes.",
    "tenant",
    "what",
)
