"""Alert rules for Prometheus, each with its meaning and a remedy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from hicache_storage.observability import metric_defs as v
from hicache_storage.tools.metrics.queries import (
    grown,
    now,
    quantile,
    rate,
    selected,
    share,
    summed,
)

PAGE: Final = "docs/observability.md"
TOKEN_SECONDS: Final = 7 * 24 * 3600
"""Time before the expiry of a token at which the alert fires."""
CERTIFICATE_SECONDS: Final = 14 * 24 * 3600
"""Time before the expiry of a certificate; automatic renewal starts a month before it."""
SPARE_SHARE: Final = 4
"""Slots of a scope for each one in quarantine from which on the alert fires: half of the largest
share that the server keeps, `hicache_metadata_server.protocol.MAX_SPARE_SHARE`.
"""

MAX_FAILOVERS: Final = 3
"""Failovers in 15 minutes that restarts of several servers explain.

`increase` extrapolates three to 3.2 at one scrape a minute; hence the half in the rule.
"""


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule, with a section of its name in `docs/observability.md`."""

    name: str
    expr: str
    lasts: str
    """Time for which the expression has to hold."""
    severity: str
    """`critical`: to be handled now. `warning`: within the day."""
    summary: str
    """One line, with labels in Go's templates."""
    means: str
    do: str

    @property
    def anchor(self) -> str:
        """Anchor of its section."""
        return self.name.lower()


def _hits(window: str) -> str:
    hit, miss = (
        rate(v.LOOKED_UP_KEYS, window, f'result="{result}"', by=("scope",))
        for result in ("hit", "miss")
    )
    return share(hit, miss)


_WHOLE: Final = '{{ printf "%.0f" $value }}'
"""Increase of a counter, rounded: Prometheus extrapolates it to the window, as to 1.07 pages."""
_FAILED: Final = summed(
    # `unless` by instance: each server drains by itself.
    f"""rate({selected(v.REQUESTS, 'status=~"5.."')}[5m]) unless on (job, instance) {v.DRAINING.name} == 1""",
    "route",
)
"""Failed requests, except of a server that drains.

It refuses leases, and its clients use another server.
"""
_LEASED: Final = now(v.SLOTS, 'state="leased"', by=("scope",))
_SLOTS: Final = now(v.SLOTS, by=("scope",))
_QUARANTINED: Final = (
    # `scalar`, because the setting has no label `scope` to be joined by.
    f"{rate(v.SCOPE_EVICTED_PAGES, '5m', by=('scope',))} * scalar(max({v.QUARANTINE_SECONDS.name}))"
)

ALERTS: Final = (
    Alert(
        "HiCacheStoreFailing",
        f"{v.STORE_FAILING.name} == 1",
        "1m",
        "critical",
        "The metadata server {{ $labels.instance }} cannot write its store.",
        "Changes are answered 503: nothing is stored any more. Lookups go on, and what is stored "
        "can be read.",
        "The server's log has a line `store_failing` with the reason: the disk is full or has "
        "failed, or Redis does not answer or is out of memory. Repair it; the server tries again "
        "every second, goes on by itself, and logs `store_serving`. Nothing that was acknowledged "
        "is lost.",
    ),
    Alert(
        "HiCacheServerNotReady",
        f"{v.READY.name} == 0 and {v.DRAINING.name} == 0",
        "2m",
        "critical",
        "The metadata server {{ $labels.instance }} is not ready.",
        "`/readyz` answers 503 though nobody drains the server.",
        "`curl http://HOST:18000/readyz` says why. With a failing store, see "
        "[HiCacheStoreFailing](#hicachestorefailing).",
    ),
    Alert(
        "HiCacheServerAbsent",
        f"absent({v.READY.name})",
        "2m",
        "critical",
        "No metadata server is scraped.",
        "There is none, or Prometheus cannot reach any. The drivers answer misses; engines compute "
        "what they would have fetched.",
        "See whether the process runs, and whether Prometheus has a read token for `/metrics`. "
        "One of several that is gone is not seen here, since nothing but your scrape "
        "configuration knows how many there are: `up == 0` of their job tells.",
    ),
    Alert(
        "HiCacheScopesUnowned",
        f"max({v.UNOWNED_SCOPES.name}) > 0",
        "1m",
        "critical",
        "{{ $value }} scopes on the shared Redis have no owner.",
        "Requests about them are answered 503 `moving`, and are misses. A server takes a free scope "
        "within seconds, unless it cannot read it.",
        "If HiCacheStoreFailing fires too, or a log has a line `store_failing`, repair Redis: the "
        "servers go on by themselves, and nothing is deleted. Otherwise a line `scope_unreadable` "
        "names a scope that cannot be read; only that one may be removed: stop all servers, and "
        "delete its keys as docs/metadata-server.md#what-is-in-it says.",
    ),
    Alert(
        "HiCacheServerDraining",
        f"{v.DRAINING.name} == 1",
        "30m",
        "warning",
        "The metadata server {{ $labels.instance }} has drained for half an hour.",
        "It gives no new leases, so that nothing new is stored. Somebody has forgotten it, or a "
        "restart has failed.",
        "`hicache metadata drain --off`, or finish the restart.",
    ),
    Alert(
        "HiCacheRecoveryProblems",
        f"{v.RECOVERY_PROBLEMS.name} > 0",
        "0m",
        "warning",
        "The metadata server {{ $labels.instance }} has found {{ $value }} contradictions in its "
        "store.",
        "They were left out at the last start: pages that are lost, never pages that are wrong. "
        "The store was damaged by something else.",
        "Look at the lines `left_out` in its log; run `hicache metadata fsck`; look at the disk. "
        "The number is back at 0 after a start that finds none.",
    ),
    Alert(
        "HiCacheServerErrors",
        f"{_FAILED} / {rate(v.REQUESTS, '5m', by=('route',))} > 0.01",
        "5m",
        "critical",
        "{{ $value | humanizePercentage }} of the requests to {{ $labels.route }} fail.",
        "The server answers 5xx, and does not drain. 503 means that it cannot write; 500 is a "
        "fault in it.",
        "Each 500 has a line `request_failed` with a trace and the request's id in the log: report "
        "it.",
    ),
    Alert(
        "HiCacheHitRatioDrop",
        f"{_hits('30m')} < 0.5 * {_hits('1d')} and {rate(v.LOOKED_UP_KEYS, '30m', by=('scope',))} "
        "> 1",
        "30m",
        "warning",
        "The hit ratio of {{ $labels.scope }} is {{ $value | humanizePercentage }}, less than half "
        "of the last day's.",
        "Engines ask for other pages than were stored (a new model, tokenizer, salt or page "
        "size), the cache was emptied, or it is too small for what is asked for now.",
        "Compare `hicache_metadata_evicted_pages_total` (too small), the scopes' live slots "
        "(emptied), and whether new scopes have appeared (another identity).",
    ),
    Alert(
        "HiCacheLeasesExpire",
        f"{rate(v.EXPIRED_LEASES, '10m', by=('scope',))} > 0.1",
        "15m",
        "warning",
        "{{ $value | humanize }} leases a second of {{ $labels.scope }} are never committed.",
        "Writers reserve slots and do not come back: they die, or a write takes longer than a "
        "lease.",
        "Look for engines that restart, and at `hicache_storage_call_seconds` of `set`. If writes "
        "are slow, raise the driver's `lease_seconds`.",
    ),
    Alert(
        "HiCacheLeasedSlots",
        f"{_LEASED} / {_SLOTS} > 0.25",
        "15m",
        "warning",
        "{{ $value | humanizePercentage }} of the slots of {{ $labels.scope }} are leased.",
        "Slots that are being written hold no page that can be read. Many for long means writers "
        "that are stuck.",
        "As for [HiCacheLeasesExpire](#hicacheleasesexpire); or there are too few slots for so "
        "many writers.",
    ),
    Alert(
        "HiCacheQuarantineShort",
        f"{_QUARANTINED} > {_SLOTS} / {SPARE_SHARE}",
        "10m",
        "warning",
        "{{ $labels.scope }} evicts faster than its slots leave quarantine.",
        f"More than one of {SPARE_SHARE} slots is evicted in the time that a slot is quarantined: pages "
        "are kept for a short time only. A full scope keeps half of its slots free or quarantined at "
        "most; from then on sets wait for slots, and some are refused.",
        "Make the file larger (`file_size`), or shorten `QUARANTINE_SECONDS`, which must stay "
        "longer than a reader takes from lookup to the last byte.",
    ),
    Alert(
        "HiCacheRequestsSlow",
        f"{quantile(0.99, v.REQUEST_SECONDS, '5m', by=('route',))} > 0.05",
        "10m",
        "warning",
        "The 99th percentile of {{ $labels.route }} is {{ $value | humanizeDuration }}.",
        "The metadata server is at its limit (one core a process), its store is slow, or requests "
        "are very long.",
        "Compare `process_cpu_seconds_total` (near 1 a second: add a server) and "
        "`hicache_metadata_transaction_seconds` (slow store). "
        "`HICACHE_METADATA_SLOW_SECONDS=0.05` logs each slow request with what it asked for.",
    ),
    Alert(
        "HiCacheReloadFails",
        f"{v.RELOAD_FAILING.name} == 1",
        "2m",
        "critical",
        "The metadata server {{ $labels.instance }} cannot take its {{ $labels.what }}.",
        "A file of tokens, tenants or certificates was changed, and cannot be used as it is. What "
        "it held before counts: a token that was revoked there still opens the door, and the "
        "server would not start again with this file.",
        "The server's log has a line `reload_failed` with the reason. `hicache metadata token "
        "check --file FILE` says the same of tokens. The server takes the file within a second of "
        "its repair.",
    ),
    Alert(
        "HiCacheTokenExpires",
        f"{v.NEXT_TOKEN_EXPIRY.name} - time() < {TOKEN_SECONDS}",
        "0m",
        "warning",
        "A token of {{ $labels.instance }} expires in {{ $value | humanizeDuration }}.",
        "Whoever sends it is refused then. An engine goes on with misses.",
        "`hicache metadata token list` names it. Make another (`token new`), give it to those who "
        "need it, and revoke the old one.",
    ),
    Alert(
        "HiCacheCertificateExpires",
        f"{v.CERTIFICATE_EXPIRY.name} - time() < {CERTIFICATE_SECONDS}",
        "0m",
        "warning",
        "A certificate in {{ $labels.file }} of {{ $labels.instance }} expires in {{ $value | "
        "humanizeDuration }}.",
        "Every client refuses the server then, or the server its clients, if it is the "
        "authority's. Whatever renews it has not done so.",
        "Put the new certificate in the place of the old one: the server takes it within a second, "
        "and connections go on.",
    ),
    Alert(
        "HiCacheTenantThrottled",
        f"{rate(v.THROTTLED, '10m', by=('tenant',))} > 1",
        "15m",
        "warning",
        "{{ $value | humanize }} requests a second of tenant {{ $labels.tenant }} are beyond its "
        "rate.",
        "They are answered 429, which its engines take for misses.",
        "Raise `requests_per_second` of the tenant, or find out who asks so much; other tenants "
        "are not affected.",
    ),
    Alert(
        "HiCacheCallsSlow",
        f"{quantile(0.99, v.CALL_SECONDS, '5m', by=('driver', 'operation'))} > 2",
        "10m",
        "warning",
        "The 99th percentile of {{ $labels.operation }} by {{ $labels.driver }} is {{ $value | "
        "humanizeDuration }}.",
        "The store behind the driver is slow. Calls that reach their deadline become misses.",
        "`hicache doctor` and `hicache bench` on that node tell storage and network apart; traces "
        "tell the metadata server from the data.",
    ),
    Alert(
        "HiCacheDamagedPages",
        f"{grown(v.DAMAGED_PAGES, '15m', by=('driver', 'pool'))} > 0",
        "0m",
        "critical",
        f"{{{{ $labels.driver }}}} has found {_WHOLE} pages of {{{{ $labels.pool }}}} with wrong "
        "bytes.",
        "Bytes were read that are not the page that was asked for. They were found by length, "
        "envelope or checksum, and answered as misses; nothing wrong has reached an engine. Disk, "
        "memory, network or another program has changed them.",
        "The SDK's log names the first key of each call. Look at the disk's and the kernel's log; "
        "see that nobody else writes into the directory. Damaged pages are replaced when they are "
        "stored again.",
    ),
    Alert(
        "HiCacheBreakerOpen",
        f"{v.BREAKER_OPEN.name} == 1",
        "2m",
        "critical",
        "{{ $labels.instance }} does not ask its store any more ({{ $labels.driver }}, "
        "{{ $labels.operation }}).",
        "Several calls of this kind in a row have failed. All of them are misses; every few seconds "
        "one is let through to try.",
        "The SDK's log says what failed first (`answering misses`). Repair the store; the breaker "
        "closes by itself.",
    ),
    Alert(
        "HiCacheFaults",
        f"{rate(v.FAULTS, '5m', by=('driver',))} > 0.1",
        "10m",
        "warning",
        "{{ $value | humanize }} calls of {{ $labels.driver }} fail in a second.",
        "Calls of the driver raise, or do not come back in time, and are answered as misses.",
        "As for [HiCacheBreakerOpen](#hicachebreakeropen). "
        "`hicache_storage_missed_deadlines_total` tells slow from broken.",
    ),
    Alert(
        "HiCacheFailovers",
        f"increase({selected(v.FAILOVERS)}[15m]) > {MAX_FAILOVERS + 0.5}",
        "0m",
        "warning",
        f"A client at {{{{ $labels.instance }}}} has left a metadata server {_WHOLE} times in 15 "
        "minutes.",
        "A server answers some requests and not others, or several have failed one after another. "
        "Calls have gone on elsewhere.",
        "The client's log names the server that was left and why. A single restart is one failover "
        "for each client.",
    ),
    Alert(
        "HiCacheStuckCalls",
        f"{v.STUCK_CALLS.name} > 0",
        "10m",
        "warning",
        "{{ $value }} calls of the storage have not come back on {{ $labels.instance }}.",
        "The hybrid controller has left them behind; the host memory that they could still write "
        "to is out of use until they return.",
        "Something below hangs without an end: a mount, a device. Restart the engine when it is "
        "repaired.",
    ),
    Alert(
        "HiCacheDroppedBackups",
        f"{share(rate(v.DROPPED_PAGES, '15m'), rate(v.BACKED_UP_PAGES, '15m'))} > 0.05",
        "15m",
        "warning",
        "{{ $value | humanizePercentage }} of the pages are given up on their way to storage.",
        "Sets are refused again and again: no room, pages too large, or a store that fails.",
        "`hicache_storage_refused_pages_total` and `hicache_storage_faults_total` tell which.",
    ),
)


def rules(page: str = "") -> str:
    """Render a file of rules for Prometheus: YAML, with strings quoted as in JSON.

    Args:
        page: URL of the published page `observability`; "" for a path in the repository.
    """
    lines = [
        (
            "# Made by `make metrics` out of the declared metrics; docs/observability.md says what "
            "each means."
        ),
        "groups:",
    ]
    lines += ["  - name: hicache", "    rules:"]
    for alert in ALERTS:
        annotations = {
            "summary": alert.summary,
            "description": f"{alert.means} {alert.do}",
            # A path is no URL, and user interfaces render `runbook_url` as a link.
            "runbook_url" if page else "runbook": f"{page or PAGE}#{alert.anchor}",
        }
        lines += [
            f"      - alert: {alert.name}",
            # A JSON string is a YAML string as well, and expressions have quotes and braces in
            # them.
            f"        expr: {json.dumps(alert.expr)}",
            f"        for: {alert.lasts}",
            f"        labels: {{severity: {alert.severity}}}",
            "        annotations:",
            *(f"          {name}: {json.dumps(text)}" for name, text in annotations.items()),
        ]
    return "\n".join(lines) + "\n"
