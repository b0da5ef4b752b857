"""Reasons that pages are not found, from the store: `hicache why`.

A namespace is an identity, a pool and a page geometry. The geometry is not asked for: the store has
a description of each of its namespaces, whose identity is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, cast

from hicache_storage.layers import StorageOptions, innermost
from hicache_storage.objects import (
    Call,
    LookupBatch,
    Namespace,
    ObjectRead,
    ObjectStorage,
    ReadBatch,
)
from hicache_storage.objects.thread_pool import ThreadPool
from hicache_storage.plugins import create_storage
from hicache_storage.spec import (
    PoolName,
    Sharing,
    StorageIdentity,
    StorageTimeoutError,
    UnsupportedOperationError,
)
from hicache_storage.spec.arguments import did_you_mean
from hicache_storage.spec.identity import IDENTITY_FIELDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UNGIVEN: Final = {"model": "unknown", "kv_dtype": "unknown", "page_size": 1, "layout": "unknown"}
"""Of the fields that an identity must have, while a store is asked about all of them."""
RANK_FIELDS: Final = frozenset(
    f"{name}_{part}"
    for name, part in [
        *((name, "rank") for name in ("tp", "pp", "cp", "dp")),
        *((name, part) for name in ("layer", "head", "shard") for part in ("start", "end")),
    ]
)
"""Fields in which the parts of one page differ; a hit needs all of its parts."""


class PageState(StrEnum):
    """State of a page, or of one of its parts; of several parts the first one in this order."""

    THERE = "there"
    INCOMPLETE = "incomplete"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"
    """The store could not be asked."""
    REMOVED = "removed"
    OTHER_IDENTITY = "other identity"
    NEVER_STORED = "never stored"
    """As far as the store remembers."""


ORDER: Final = list(PageState)
State = tuple[PageState, str]
"""An answer and its reason."""
Differences = dict[str, tuple[object, object]]
"""Fields that differ: the value in the store, and the one that was asked for."""


@dataclass(frozen=True, slots=True)
class KeyAnswer:
    """PageState for one key."""

    key: str
    answer: PageState
    detail: str
    parts: dict[str, str]
    """PageState for each part of the page: by pool, and by rank or shard where there are several."""


@dataclass(frozen=True, slots=True)
class StoredIdentity:
    """Identity of pages in the store, beside the one that is asked for."""

    pool: str
    namespace: str
    page_bytes: int
    identity: dict[str, object]
    differs: Differences


@dataclass(frozen=True, slots=True)
class WhyReport:
    """Answers for keys, and all identities that the store has pages of."""

    identities: list[StoredIdentity]
    answers: list[KeyAnswer]


class WantedIdentity:
    """Fields of an identity; those that are not given may have any value.

    Raises:
        ValueError: a field is unknown.
        InvalidIdentityError: a value is illegal.
    """

    def __init__(self, fields: Mapping[str, object]) -> None:
        for name in fields.keys() - set(IDENTITY_FIELDS):
            hint = did_you_mean(name, IDENTITY_FIELDS)
            raise ValueError(f"identity: there is no field {name!r}{hint}")
        self.identity = StorageIdentity(**cast("dict[str, Any]", UNGIVEN | dict(fields)))
        self._given = {name: getattr(self.identity, name) for name in fields}

    def differing(self, namespace: Namespace) -> Differences:
        """Return the given fields that decide in a namespace and have another value there."""
        stored = fields_of(namespace)
        return {
            name: (stored[name], given)
            for name, given in self._given.items()
            if name in stored and stored[name] != given
        }

    def labels(self, namespace: Namespace) -> tuple[str, list[str]]:
        """Return the label of the part of a page in a namespace, and those of all of its parts."""
        fields, pool = fields_of(namespace), str(namespace.pool)
        kind, own, size = "tp_rank", namespace.identity.tp_rank, int(fields.get("tp_size", 1))
        parts = range(own, own + 1) if "tp_rank" in self._given else range(size)
        if namespace.shard is not None:
            kind, own, size = "shard", namespace.shard, namespace.identity.store_tp_size
            parts = range(size)
            if "tp_size" in self._given:
                first = self.identity.tp_rank * size // self.identity.tp_size
                parts = range(first, first + max(1, size // self.identity.tp_size))
        for name in ("pp", "cp", "dp"):
            if int(fields.get(f"{name}_size", 1)) > 1:
                pool += f" {name}_rank {fields[f'{name}_rank']}"
        labels = {number: f"{pool} {kind} {number}" if size > 1 else pool for number in parts}
        return labels.get(own, ""), list(labels.values())


def fields_of(namespace: Namespace) -> dict[str, str | int | bool]:
    """Return the fields that decide about sharing in a namespace."""
    return namespace.identity.deciding_fields(namespace.pool, namespace.shard)


def difference_text(differs: Differences) -> str:
    """Format fields that differ."""
    return ", ".join(
        f"{name} {theirs!r} and not {ours!r}" for name, (theirs, ours) in differs.items()
    )


def varying_fields(identities: Sequence[Mapping[str, object]]) -> list[str]:
    """Format for each identity the fields in which it differs from others."""
    values = dict[str, set[str]]()
    for identity in identities:
        for name in identity:
            values.setdefault(name, {str(one.get(name)) for one in identities})
    return [
        ", ".join(f"{name} {value!r}" for name, value in identity.items() if len(values[name]) > 1)
        for identity in identities
    ]


def explain(
    driver: str,
    options: Mapping[str, object],
    wanted: WantedIdentity,
    keys: Sequence[str],
    seconds: float,
) -> WhyReport:
    """Open a store, and find out what it has and knows of pages.

    Nothing is changed, but that a page which is found may count as used.

    Args:
        driver: name of the driver.
        options: of the driver.
        wanted: identity under which the engine asks.
        keys: of pages.
        seconds: deadline.

    Raises:
        UnsupportedOperationError: the driver does not describe what its store has, or shares it
            with no other process.
        HiCacheError: the store cannot be opened or asked.
    """
    layers = StorageOptions(deadline_seconds=seconds, breaker_threshold=0)
    with create_storage(driver, wanted.identity, options, options=layers) as storage:
        inner, health = innermost(storage), storage.health()
        if storage.capabilities.sharing is not Sharing.PROCESSES:
            raise UnsupportedOperationError(
                f"driver {driver!r} with these options shows its pages to no other process"
            )
        if not isinstance(inner, ObjectStorage):
            raise UnsupportedOperationError(f"driver {driver!r} is no ObjectStorage")
        refusal = "" if health.writable else f"the store takes no sets: {health.detail}"
        pages = _StoredPages(inner, keys, Call(seconds))
        # A thread of its own: a hung mount does not end at a deadline.
        threads = ThreadPool("hicache-why")
        try:
            task = threads.submit(lambda: _report(driver, pages, wanted, keys, refusal))
            if task is None or not task.wait(seconds):
                raise StorageTimeoutError(f"{driver}: no answer within {seconds} s")
            return task.result()
        finally:
            threads.close(0)


def _report(
    driver: str, pages: _StoredPages, wanted: WantedIdentity, keys: Sequence[str], refusal: str
) -> WhyReport:
    found = pages.driver.described_namespaces()
    if found is None:
        raise UnsupportedOperationError(f"driver {driver!r} does not describe what its store has")
    differs = {one: wanted.differing(one) for one in found}
    found.sort(key=lambda one: (len(differs[one]), one.pool, one.name))
    groups = _by_identity([one for one in found if not differs[one]])
    names = varying_fields([fields_of(group[0]) for group in groups])
    answers = list[KeyAnswer]()
    for key in keys:
        # For each identity that fits, the best first.
        states = [
            (*_state(pages, wanted, group, key), name)
            for group, name in zip(groups, names, strict=True)
        ]
        states.append(((PageState.NEVER_STORED, "no page of this identity was"), {}, ""))
        (answer, detail), parts, name = min(states, key=lambda one: ORDER.index(one[0][0]))
        notes = [detail]
        if len(groups) > 1:
            is_there = ORDER.index(answer) < ORDER.index(PageState.REMOVED)
            which = f"with {name}, one" if is_there else "under none"
            notes.append(f"{which} of {len(groups)} identities with the given fields")
        if answer in (PageState.REMOVED, PageState.NEVER_STORED):
            other = next((one for one in found if differs[one] and pages.has(one, key)), None)
            if other is not None:
                # What is known of its removal stays.
                notes = notes[:1] if answer is PageState.REMOVED else []
                notes.append(f"stored with {difference_text(differs[other])}")
                answer = PageState.REMOVED if notes[1:] else PageState.OTHER_IDENTITY
        if answer is not PageState.THERE:
            notes.append(refusal)
        answers.append(KeyAnswer(key, answer, "; ".join(filter(None, notes)), parts))
    identities = [
        StoredIdentity(str(one.pool), one.name, one.page_bytes, {**fields_of(one)}, differs[one])
        for one in found
    ]
    return WhyReport(identities, answers)


def _by_identity(namespaces: Sequence[Namespace]) -> list[list[Namespace]]:
    """Divide namespaces by identity: fields that are not given may differ, but in parts of a page.

    A side pool has fewer fields than KV where it is replicated, and belongs to each that it fits.
    """

    def fits(one: Namespace, other: Namespace) -> bool:
        mine, theirs = fields_of(one), fields_of(other)
        return all(mine[name] == theirs[name] for name in mine.keys() & theirs.keys() - RANK_FIELDS)

    groups = list[list[Namespace]]()
    for namespace in sorted(namespaces, key=lambda one: one.pool != PoolName.KV):
        fitting = [group for group in groups if fits(namespace, group[0])]
        for group in fitting:
            group.append(namespace)
        if not fitting:
            groups.append([namespace])
    return groups


def _state(
    pages: _StoredPages, wanted: WantedIdentity, namespaces: Sequence[Namespace], key: str
) -> tuple[State, dict[str, str]]:
    """Return the state of a page of one identity, and the answer for each of its parts."""
    parts = dict[str, State]()
    for namespace in namespaces:
        own, labels = wanted.labels(namespace)
        for label in labels:
            state = pages.state(namespace, key) if label == own else (PageState.NEVER_STORED, "")
            # Of several geometries of one part, the one that has the page.
            parts[label] = min(state, parts.get(label, state), key=lambda one: ORDER.index(one[0]))
    answers = {label: str(answer) for label, (answer, _) in parts.items()}
    missing = {label: state for label, state in parts.items() if state[0] is not PageState.THERE}
    if not missing:
        return (PageState.THERE, ", ".join(parts)), answers
    first = min((answer for answer, _ in missing.values()), key=ORDER.index)
    if first not in (PageState.DAMAGED, PageState.UNKNOWN) and len(missing) < len(parts):
        first = PageState.INCOMPLETE
    texts = [
        f"{label}: {detail or answer}"
        for label, (answer, detail) in missing.items()
        if first in (answer, PageState.INCOMPLETE)
    ]
    never = first is PageState.NEVER_STORED
    return (first, "as far as the store remembers" if never else ", ".join(texts)), answers


class _StoredPages:
    """Pages in a store, and removed ones; a namespace is asked once for all of them."""

    def __init__(self, driver: ObjectStorage, keys: Sequence[str], call: Call) -> None:
        self.driver = driver
        self._keys = list(dict.fromkeys(keys))
        self._call = call
        self._present = dict[str, list[bool]]()

    def has(self, namespace: Namespace, key: str) -> bool:
        """Return True if a page exists; False also if the store fails."""
        try:
            return self._find(namespace)[self._keys.index(key)]
        except Exception:  # noqa: BLE001 - whatever a driver raises, nothing is known
            return False

    def state(self, namespace: Namespace, key: str) -> State:
        """Return the state of a page in a namespace; the bytes of one that exists are verified."""
        try:
            return self._ask(namespace, key)
        except Exception as error:  # noqa: BLE001 - whatever a driver raises is the answer
            return PageState.UNKNOWN, f"{type(error).__name__}: {error}"

    def _find(self, namespace: Namespace) -> list[bool]:
        if namespace.name not in self._present:
            [found] = self.driver.objects_exist([LookupBatch(namespace, self._keys)], self._call)
            if self._call.expired():
                raise StorageTimeoutError("the deadline has passed")
            self._present[namespace.name] = found
        return self._present[namespace.name]

    def _ask(self, namespace: Namespace, key: str) -> State:
        if self._find(namespace)[self._keys.index(key)]:
            read = ObjectRead.aside(namespace, key)
            [[filled]] = self.driver.read_objects([ReadBatch(namespace, [read])], self._call)
            if filled and read.verify():
                return PageState.THERE, ""
            if read.damaged:
                return PageState.DAMAGED, f"a page {read.defect()}"
            return PageState.UNKNOWN, "it exists, and was not read"
        removals = self.driver.recall_removals([LookupBatch(namespace, [key])], self._call)
        if not removals:
            return PageState.NEVER_STORED, ""
        last = removals[-1]
        at = datetime.fromtimestamp(last.seconds, UTC).isoformat(" ", "seconds")
        parts = [str(last.reason), at if last.seconds else "", last.by and f"by {last.by}"]
        return PageState.REMOVED, " ".join(filter(None, parts))
