"""Reasons that pages are not found, from the store: `hicache why`.

A namespace is an identity, a pool and a page geometry. The geometry is not asked for: the store has
a description of each of its namespaces, whose identity is compared.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
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
from hicache_storage.spec.identity import IDENTITY_FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hicache_storage.objects import ObjectRemoval
    from hicache_storage.spec import Health

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


class Answer(StrEnum):
    """State of a page, or of one of its parts; the best of several comes first."""

    THERE = "there"
    INCOMPLETE = "incomplete"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"
    """The store could not be asked."""
    REMOVED = "removed"
    OTHER_IDENTITY = "other identity"
    NEVER_STORED = "never stored"
    """As far as the store remembers."""


ORDER: Final = list(Answer)


@dataclass(frozen=True, slots=True)
class State:
    """An answer and its reason."""

    answer: Answer
    detail: str = ""


@dataclass(frozen=True, slots=True)
class KeyAnswer:
    """Answer for one key."""

    key: str
    answer: Answer
    detail: str
    parts: dict[str, str]
    """Answer for each part of the page: by pool, and by rank or shard where there are several."""


@dataclass(frozen=True, slots=True)
class StoredIdentity:
    """Identity of pages in the store, beside the one that is asked for."""

    pool: str
    namespace: str
    page_bytes: int
    identity: dict[str, object]
    differs: dict[str, tuple[object, object]]
    """Fields that differ: the value in the store, and the one that was asked for."""


@dataclass(frozen=True, slots=True)
class Report:
    """Answers for keys, and all identities that the store has pages of."""

    identities: list[StoredIdentity]
    answers: list[KeyAnswer] = field(default_factory=list[KeyAnswer])

    @property
    def all_there(self) -> bool:
        """True if each page is there."""
        return all(one.answer is Answer.THERE for one in self.answers)


class WantedIdentity:
    """Fields of an identity; those that are not given may have any value.

    Raises:
        ValueError: a field is unknown.
        InvalidIdentityError: a value is illegal.
    """

    def __init__(self, fields: Mapping[str, object]) -> None:
        for name in fields:
            if name not in IDENTITY_FIELDS:
                near = difflib.get_close_matches(name, IDENTITY_FIELDS, 1)
                hint = f"; do you mean {near[0]!r}?" if near else ""
                raise ValueError(f"identity: there is no field {name!r}{hint}")
        self.identity = StorageIdentity(**cast("dict[str, Any]", UNGIVEN | dict(fields)))
        self._fields = {name: getattr(self.identity, name) for name in fields}

    def differing(self, namespace: Namespace) -> dict[str, tuple[object, object]]:
        """Return the given fields that decide there and have another value: stored, and given."""
        stored = fields_of(namespace)
        return {
            name: (stored[name], given)
            for name, given in self._fields.items()
            if name in stored and stored[name] != given
        }

    def labels(self, namespace: Namespace) -> tuple[str, list[str]]:
        """Return the label of the part of a page in a namespace, and those of all of its parts."""
        stored, fields = namespace.identity, fields_of(namespace)
        ranks = [
            f" {name}_rank {fields[f'{name}_rank']}"
            for name in ("pp", "cp", "dp")
            if int(fields.get(f"{name}_size", 1)) > 1
        ]
        kind, own, parts = "tp_rank", stored.tp_rank, range(int(fields.get("tp_size", 1)))
        if namespace.shard is not None:
            kind, own, size = "shard", namespace.shard, stored.store_tp_size
            parts = range(size)
            if "tp_size" in self._fields:
                first = self.identity.tp_rank * size // self.identity.tp_size
                parts = range(first, first + max(1, size // self.identity.tp_size))
        elif "tp_rank" in self._fields:
            parts = range(own, own + 1)

        def label(number: int) -> str:
            several = namespace.shard is not None or int(fields.get("tp_size", 1)) > 1
            return "".join([namespace.pool, f" {kind} {number}" if several else "", *ranks])

        return label(own), [label(number) for number in parts]


def fields_of(namespace: Namespace) -> dict[str, str | int | bool]:
    """Return the fields that decide about sharing in a namespace."""
    return namespace.identity.deciding_fields(namespace.pool, namespace.shard)


def explain(
    driver: str,
    options: Mapping[str, object],
    wanted: WantedIdentity,
    keys: Sequence[str],
    seconds: float,
) -> Report:
    """Open a store, and find out what it has and knows of pages.

    Nothing is changed, but that a page which is found may count as used.

    Args:
        driver: name of the driver.
        options: of the driver.
        wanted: identity under which the engine asks.
        keys: of pages; without any, the identities alone are listed.
        seconds: deadline.

    Raises:
        UnsupportedOperationError: the driver does not describe what its store has, or shares it
            with no other process.
        HiCacheError: the store cannot be opened or asked.
    """
    with create_storage(
        driver,
        wanted.identity,
        options,
        options=StorageOptions(deadline_seconds=seconds, breaker_threshold=0),
    ) as storage:
        if storage.capabilities.sharing is not Sharing.PROCESSES:
            raise UnsupportedOperationError(
                f"driver {driver!r} with these options shows its pages to no other process"
            )
        inner, call = innermost(storage), Call(seconds)
        health = storage.health()
        # A thread of its own: a hung mount does not end at a deadline.
        pool = ThreadPool("hicache-why")
        try:
            task = pool.submit(lambda: _report(driver, inner, wanted, keys, call, health))
            if task is None or not task.wait(seconds):
                raise StorageTimeoutError(f"{driver}: no answer within {seconds} s")
            return task.result()
        finally:
            pool.close(0)


def _report(
    name: str,
    driver: object,
    wanted: WantedIdentity,
    keys: Sequence[str],
    call: Call,
    health: Health,
) -> Report:
    found = driver.described_namespaces() if isinstance(driver, ObjectStorage) else None
    if found is None:
        raise UnsupportedOperationError(f"driver {name!r} does not describe what its store has")
    differs = {namespace: wanted.differing(namespace) for namespace in found}
    identities = [
        StoredIdentity(str(one.pool), one.name, one.page_bytes, dict(fields_of(one)), differs[one])
        for one in sorted(found, key=lambda one: (len(differs[one]), one.pool, one.name))
    ]
    if not keys:
        return Report(identities)
    asked = _Pages(cast("ObjectStorage", driver), keys, call)
    own = [one for one in found if not differs[one]]
    others = sorted(differs.keys() - own, key=lambda one: len(differs[one]))
    groups = _alternatives(own)
    alternatives = [_Alternative(asked, wanted, some) for some in groups]
    names = varying_fields([dict(fields_of(some[0])) for some in groups])
    answers = list[KeyAnswer]()
    for key in keys:
        states = [one.state(key) for one in alternatives]
        best, parts = min(
            states or [(State(Answer.NEVER_STORED, "no page of this identity was"), {})],
            key=lambda one: ORDER.index(one[0].answer),
        )
        if best.answer in (Answer.NEVER_STORED, Answer.REMOVED):
            best = _elsewhere(best, key, [(one, differs[one]) for one in others], asked)
        notes = [best.detail]
        if len(alternatives) > 1:
            at = next((at for at, (_, own) in enumerate(states) if own is parts), 0)
            notes.append(
                f"of {len(alternatives)} identities with the given fields, the one with {names[at]}"
                if best.answer in (Answer.THERE, Answer.INCOMPLETE, Answer.DAMAGED)
                else f"under none of {len(alternatives)} identities with the given fields"
            )
        if best.answer is not Answer.THERE and not health.writable:
            notes.append(f"the store takes no sets: {health.detail}")
        answers.append(KeyAnswer(key, best.answer, "; ".join(filter(None, notes)), parts))
    return Report(identities, answers)


def _elsewhere(
    state: State,
    key: str,
    others: Iterable[tuple[Namespace, dict[str, tuple[object, object]]]],
    asked: _Pages,
) -> State:
    """Complete the state of a page that is not there: it may be, under another identity."""
    for namespace, differs in others:
        if asked.present(namespace).get(key):
            text = f"stored with {', '.join(map(difference_text, differs, differs.values()))}"
            if state.answer is Answer.REMOVED:
                return State(state.answer, f"{state.detail}; {text}")
            return State(Answer.OTHER_IDENTITY, text)
    return state


def varying_fields(identities: Sequence[Mapping[str, object]]) -> list[str]:
    """Format the fields in which identities differ, for each of them."""
    names = dict.fromkeys(name for identity in identities for name in identity)
    varying = [
        name for name in names if len({str(identity.get(name)) for identity in identities}) > 1
    ]
    return [
        ", ".join(f"{name} {identity[name]!r}" for name in varying if name in identity)
        for identity in identities
    ]


def difference_text(name: str, values: tuple[object, object]) -> str:
    """Format a field that differs."""
    return f"{name} {values[0]!r} and not {values[1]!r}"


def _alternatives(own: Sequence[Namespace]) -> list[list[Namespace]]:
    """Divide namespaces by identity: fields that are not given may differ, and then no page is one.

    A side pool has fewer fields than KV where it is replicated, and belongs to each that it fits.
    """
    groups = list[list[Namespace]]()
    for namespace in sorted(own, key=lambda one: one.pool != PoolName.KV):
        fitting = [group for group in groups if _fits(namespace, group[0])]
        for group in fitting:
            group.append(namespace)
        if not fitting:
            groups.append([namespace])
    return groups


def _fits(one: Namespace, other: Namespace) -> bool:
    mine, theirs = fields_of(one), fields_of(other)
    return all(mine[name] == theirs[name] for name in mine.keys() & theirs.keys() - RANK_FIELDS)


class _Alternative:
    """The namespaces of one identity, by the part of a page that each one holds."""

    def __init__(
        self, asked: _Pages, wanted: WantedIdentity, namespaces: Sequence[Namespace]
    ) -> None:
        self._asked = asked
        self._parts = dict[str, list[Namespace]]()
        for namespace in namespaces:
            own, labels = wanted.labels(namespace)
            for label in labels:
                holders = self._parts.setdefault(label, [])
                if label == own:
                    holders.append(namespace)

    def state(self, key: str) -> tuple[State, dict[str, str]]:
        """Return the state of a page, and the answer for each of its parts."""
        parts = {
            # Of several geometries of one part, the one that has the page.
            label: min(
                (self._asked.state(namespace, key) for namespace in holders),
                key=lambda state: ORDER.index(state.answer),
                default=State(Answer.NEVER_STORED),
            )
            for label, holders in self._parts.items()
        }
        answers = {label: str(state.answer) for label, state in parts.items()}
        missing = {
            label: state for label, state in parts.items() if state.answer is not Answer.THERE
        }
        if not missing:
            return State(Answer.THERE, ", ".join(parts)), answers
        first = min(missing.values(), key=lambda state: ORDER.index(state.answer))
        if first.answer not in (Answer.DAMAGED, Answer.UNKNOWN) and len(missing) < len(parts):
            first = State(Answer.INCOMPLETE)
        texts = [
            f"{label}: {state.detail or state.answer}"
            for label, state in missing.items()
            if first.answer in (state.answer, Answer.INCOMPLETE)
        ]
        if first.answer is Answer.NEVER_STORED:
            texts = ["as far as the store remembers"]
        return State(first.answer, ", ".join(texts)), answers


class _Pages:
    """What the store has and remembers of some pages, asked once for each namespace."""

    def __init__(self, driver: ObjectStorage, keys: Sequence[str], call: Call) -> None:
        self._driver = driver
        self._keys = list(dict.fromkeys(keys))
        self._call = call
        self._present = dict[str, dict[str, bool]]()
        self._states = dict[str, dict[str, State]]()

    def present(self, namespace: Namespace) -> dict[str, bool]:
        """Return which pages exist; empty if the store fails."""
        if namespace.name not in self._present:
            self._present[namespace.name] = {}
            self.state(namespace, "")
        return self._present[namespace.name]

    def state(self, namespace: Namespace, key: str) -> State:
        """Return the state of a page in a namespace; the bytes of one that exists are verified."""
        if namespace.name not in self._states:
            try:
                states = self._ask(namespace)
            except Exception as error:  # noqa: BLE001 - whatever the driver raises is the answer
                states = dict.fromkeys(
                    self._keys, State(Answer.UNKNOWN, f"{type(error).__name__}: {error}")
                )
            self._states[namespace.name] = states
        return self._states[namespace.name].get(key, State(Answer.UNKNOWN))

    def _ask(self, namespace: Namespace) -> dict[str, State]:
        batch, driver = LookupBatch(namespace, self._keys), self._driver
        [found] = driver.objects_exist([batch], self._call)
        if self._call.expired():
            raise StorageTimeoutError("the deadline has passed")
        self._present[namespace.name] = dict(zip(self._keys, found, strict=True))
        absent = [key for key, ok in zip(self._keys, found, strict=True) if not ok]
        last = {
            one.key: one
            for one in driver.recall_removals([LookupBatch(namespace, absent)], self._call)
        }
        return {
            key: self._verified(namespace, key) if ok else _removed(last.get(key))
            for key, ok in zip(self._keys, found, strict=True)
        }

    def _verified(self, namespace: Namespace, key: str) -> State:
        read = ObjectRead.aside(namespace, key)
        [[filled]] = self._driver.read_objects([ReadBatch(namespace, [read])], self._call)
        if filled and read.verify():
            return State(Answer.THERE)
        if read.damaged:
            return State(Answer.DAMAGED, f"a page {read.defect()}")
        return State(Answer.UNKNOWN, "it exists, and was not read")


def _removed(removal: ObjectRemoval | None) -> State:
    if removal is None:
        return State(Answer.NEVER_STORED)
    at = datetime.fromtimestamp(removal.seconds, UTC).isoformat(" ", "seconds")
    parts = [str(removal.reason), at if removal.seconds else "", removal.by and f"by {removal.by}"]
    return State(Answer.REMOVED, " ".join(filter(None, parts)))
