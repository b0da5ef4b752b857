"""Simulated engines that share one metadata server."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, structs

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.simulation.events import Op
from hicache_metadata_server.simulation.result import SimulationResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicache_metadata_server.simulation.events import TraceEvent

BATCH: Final = 128
"""Pages of one request: SGLang's `storage_batch_size`."""
MAX_DUE: Final = 4096
"""Due slots that are processed at each event."""


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of engines and server."""

    slots: Annotated[int, Meta(ge=1)] = 100_000
    """Slots of each scope; each rank has one scope."""
    ranks: Annotated[int, Meta(ge=1)] = 8
    """Ranks that hold different bytes. Ranks that do the same are simulated once, and counted this
    many times."""
    local_pages: Annotated[int, Meta(ge=0)] = 0
    """Pages that each rank of an engine keeps in its own LRU cache on GPU and host."""
    chains: bool = True
    """True if engines send prefixes."""
    write_seconds: Annotated[float, Meta(ge=0)] = 0.05
    """Time from reserve to commit."""
    lease_seconds: Annotated[float, Meta(gt=0)] = 10.0
    quarantine_seconds: Annotated[float, Meta(ge=0)] = DEFAULTS.quarantine_seconds
    warm_up_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """Time before counting begins."""


class _Commit(msgspec.Struct, frozen=True, order=True):
    """A batch that is being written, due at `when`."""

    when: float
    number: int
    scope: str
    engine: int
    keys: list[str]
    leases: list[int]
    weight: int


class Cluster:
    """Plays events, in the order of time, to a service of its own."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        # Limits are widened to the settings: the service would otherwise cut leases silently.
        limits = structs.replace(
            DEFAULTS,
            quarantine_seconds=settings.quarantine_seconds,
            keys=max(DEFAULTS.keys, BATCH),
            max_lease_seconds=max(DEFAULTS.max_lease_seconds, settings.lease_seconds),
            min_lease_seconds=min(DEFAULTS.min_lease_seconds, settings.lease_seconds),
        )
        self.service = MetadataService(limits)
        self.outcome = SimulationResult(slots=settings.slots)
        self._local: dict[tuple[int, str], OrderedDict[str, None]] = {}
        self._writing: list[_Commit] = []
        self._numbers = itertools.count()
        self._down_until = 0.0
        self._occupancy = _Mean()
        self._second = -1
        self._in_second = 0
        self._weight = 1
        self._evicted_before = 0

    def run(self, events: Iterable[TraceEvent]) -> SimulationResult:
        """Play all events; returns the counts after the warm-up."""
        begin: float | None = None
        count_from = now = 0.0
        for event in events:
            now = event.time
            if begin is None:
                begin, count_from = now, now + self.settings.warm_up_seconds
            elif begin < count_from <= now:
                begin = count_from
                self._count_anew()
            # What falls due before the event happens before it: commits, ends of leases.
            self._settle(now)
            self._do(event)
            # No store takes the changes; they would pile up.
            self.service.forget_changes()
        self._finish(now, begin or 0.0)
        return self.outcome

    def _count_anew(self) -> None:
        self.outcome = SimulationResult(slots=self.settings.slots)
        self._occupancy = _Mean()
        self._second = -1
        self._in_second = 0
        # The service counts evictions since its start.
        self._evicted_before = self._evicted()

    def _evicted(self) -> int:
        return sum(scope.evicted for scope in self.service.list_scopes().scopes)

    def _finish(self, now: float, begin: float) -> None:
        scopes, outcome = self.service.list_scopes().scopes, self.outcome
        outcome.seconds = now - begin
        outcome.scopes = len(scopes)
        outcome.evicted = self._evicted() - self._evicted_before
        outcome.live = sum(scope.live for scope in scopes) // max(1, len(scopes))
        outcome.mean_occupancy = self._occupancy.value
        # The last second has not been compared yet.
        outcome.peak_requests = max(outcome.peak_requests, self._in_second)

    def _settle(self, now: float) -> None:
        """Process everything that is due by `now`."""
        while self._writing and self._writing[0].when <= now:
            self._commit(heapq.heappop(self._writing))
        self.service.settle(now, MAX_DUE)
        for scope in self.service.list_scopes().scopes:
            self._occupancy.add(scope.live / scope.slots)

    def _do(self, event: TraceEvent) -> None:
        name = self._scope(event.rank)
        # One scope stands for all ranks of such an event, so its requests count for each of them.
        self._weight = self.settings.ranks if event.rank is None else 1
        match event.op:
            case Op.PROMPT:
                self._prompt(event, name)
            case Op.LOOKUP:
                self._look_up(name, event.keys, event.time)
            case Op.STORE:
                self._store(name, event.engine, event.keys, "", event.time)
            case Op.DELETE:
                self._delete(name, event.keys, event.time)
            case Op.ENGINE_FAILS:
                self._fail(event.engine)
            case Op.SERVER_FAILS:
                self._down_until = max(self._down_until, event.time + event.seconds)

    def _scope(self, rank: int | None) -> str:
        """Name of a rank's scope, created at its first use; None stands for all ranks."""
        name = f"{rank or 0}:{'kv' if rank is None else 'rank'}"
        if name not in self.service.scopes:
            geometry = p.ScopeGeometry(scope=name, slots=self.settings.slots)
            self.service.initialize(p.Initialize(scopes=[geometry]), 0.0)
        return name

    # Operations of engines.

    def _prompt(self, event: TraceEvent, name: str) -> None:
        local, keys, outcome = (
            self._local.setdefault((event.engine, name), OrderedDict()),
            event.keys,
            self.outcome,
        )
        outcome.prompts += 1
        known = next((i for i, key in enumerate(keys) if key not in local), len(keys))
        outcome.local += known
        usable = self._look_up(name, keys[known:], event.time)
        outcome.usable += usable
        found = keys[known : known + usable]
        for some in _batches(found):
            # A read looks its pages up again: the first lookup has asked for existence only.
            self._ask("lookup", len(some), event.time)
            if event.time >= self._down_until:
                self._lookup(name, some, event.time)
                outcome.read_pages += len(some) * self._weight
        before = keys[known + usable - 1] if known + usable else ""
        self._store(name, event.engine, keys[known + usable :], before, event.time)
        self._keep(local, keys)

    def _look_up(self, name: str, keys: Sequence[str], now: float) -> int:
        """Look up batch by batch, as SGLang does, until a batch has a miss.

        Returns the number of pages before the first miss.
        """
        usable, outcome, asked = 0, self.outcome, 0
        for some in _batches(keys):
            self._ask("lookup", len(some), now)
            asked += len(some)
            outcome.asked += len(some)
            # An engine takes an unanswered batch for a miss, and asks no further.
            if now < self._down_until:
                outcome.unanswered += len(some)
                outcome.misses += len(some)
                break
            slots = self._lookup(name, some, now)
            there = len(slots) - slots.count(p.NO_SLOT)
            outcome.hits += there
            outcome.misses += len(slots) - there
            usable += slots.index(p.NO_SLOT) if there < len(slots) else len(slots)
            if there < len(slots):
                break
        outcome.not_asked += len(keys) - asked
        return usable

    def _store(self, name: str, engine: int, keys: Sequence[str], before: str, now: float) -> None:
        chains = self.settings.chains
        for some in _batches(keys):
            if now < self._down_until:
                self.outcome.unanswered += len(some)
                continue
            self._ask("reserve", len(some), now)
            part = p.ReserveScope(
                scope=name, keys=list(some), prefixes=[before, *some[:-1]] if chains else []
            )
            request = p.Reserve(scopes=[part], lease_seconds=self.settings.lease_seconds)
            answer = self.service.reserve(request, now).scopes[0]
            self._note_reserved(answer.states)
            # The next batch continues the chain, even if this page got no slot.
            before = some[-1]
            rows = zip(some, answer.leases, strict=True)
            leased = [(key, lease) for key, lease in rows if lease]
            if leased:
                self._write(name, engine, leased, now)

    def _note_reserved(self, states: Iterable[p.Reserved]) -> None:
        counted = Counter(states)
        self.outcome.full += counted[p.Reserved.FULL]
        self.outcome.existing += counted[p.Reserved.EXISTS] + counted[p.Reserved.BUSY]

    def _write(self, name: str, engine: int, leased: Sequence[tuple[str, int]], now: float) -> None:
        keys, leases = [key for key, _ in leased], [lease for _, lease in leased]
        commit = _Commit(
            now + self.settings.write_seconds,
            next(self._numbers),
            name,
            engine,
            keys,
            leases,
            self._weight,
        )
        if self.settings.write_seconds:
            heapq.heappush(self._writing, commit)
        else:
            self._commit(commit)

    def _commit(self, commit: _Commit) -> None:
        # The commit counts for the ranks of the event that began it.
        self._weight = commit.weight
        if commit.when < self._down_until:
            self.outcome.lost += len(commit.keys)
            return
        self._ask("commit", len(commit.keys), commit.when)
        count = len(commit.leases)
        part = p.CommitScope(
            scope=commit.scope, leases=commit.leases, lengths=[1] * count, checksums=[1] * count
        )
        states = self.service.commit(p.Commit(scopes=[part]), commit.when).scopes[0].states
        done = states.count(p.Settled.DONE)
        self.outcome.stored += done
        self.outcome.lost += count - done
        self.outcome.written_pages += done * self._weight

    def _delete(self, name: str, keys: Sequence[str], now: float) -> None:
        for some in _batches(keys):
            self._ask("delete", len(some), now)
            if now < self._down_until:
                self.outcome.unanswered += len(some)
            else:
                self.service.delete(
                    p.Delete(scopes=[p.DeleteScope(scope=name, keys=list(some))]), now
                )

    def _fail(self, engine: int) -> None:
        for local in [cache for (owner, _), cache in self._local.items() if owner == engine]:
            local.clear()
        # The leases of the engine stay, and end by themselves, as in a real cluster.
        self.outcome.lost += sum(
            len(commit.keys) for commit in self._writing if commit.engine == engine
        )
        self._writing = [commit for commit in self._writing if commit.engine != engine]
        heapq.heapify(self._writing)

    def _keep(self, local: OrderedDict[str, None], keys: Sequence[str]) -> None:
        if not self.settings.local_pages:
            return
        # From the last to the first, so that tails are evicted before heads.
        for key in reversed(keys):
            local[key] = None
            local.move_to_end(key)
        while len(local) > self.settings.local_pages:
            local.popitem(last=False)

    # Requests.

    def _lookup(self, name: str, keys: Sequence[str], now: float) -> list[int]:
        request = p.Lookup(scopes=[p.LookupScope(scope=name, keys=list(keys))])
        return self.service.lookup(request, now).scopes[0].slots

    def _ask(self, kind: str, keys: int, now: float) -> None:
        outcome, second = self.outcome, int(now)
        outcome.requests[kind] += self._weight
        outcome.keys[kind] += keys * self._weight
        if second != self._second:
            outcome.peak_requests = max(outcome.peak_requests, self._in_second)
            self._second = second
            self._in_second = 0
        self._in_second += self._weight


class _Mean:
    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        self._sum += value
        self._count += 1

    @property
    def value(self) -> float:
        return self._sum / self._count if self._count else 0.0


def _batches(keys: Sequence[str]) -> list[Sequence[str]]:
    return [keys[start : start + BATCH] for start in range(0, len(keys), BATCH)]
