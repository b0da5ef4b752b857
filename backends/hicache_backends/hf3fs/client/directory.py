"""Which slot holds which page: the operations that the driver needs, on several scopes in one request each."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from hicache_backends.hf3fs.client.failures import MetadataError, UnknownScopeError
from hicache_backends.hf3fs.client.pieces import joined, pieces
from hicache_metadata_server import protocol as p

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicache_storage.objects import Call

A = TypeVar("A", bound=p.Answer)

LOSSES: Final = 2
"""How often in one call the server may have forgotten the scopes."""


class Directory(ABC):
    """What all clients have in common: scopes are made when they are first asked about, and again when the server has lost
    them; long requests are cut; answers are checked. Safe for many threads.

    Every operation ends by the call's deadline, and raises `StorageUnavailableError` where it could not be done.
    """

    def __init__(self) -> None:
        self._declared: dict[str, _Declared] = {}
        self._made = set[str]()
        self._lock = threading.Lock()

    # What a client implements.

    @property
    @abstractmethod
    def about(self) -> p.About:
        """What the server has said of itself when it was last asked."""

    @property
    def where(self) -> str:
        """Which server is used, for people; empty without one."""
        return ""

    @abstractmethod
    def refresh(self, call: Call) -> p.About:
        """Ask the server who it is."""

    @abstractmethod
    def send(self, path: str, request: p.Request, kind: type[A], call: Call) -> A:
        """One request that is within the limits; a change is made once, however often it takes."""

    @abstractmethod
    def send_later(self, path: str, request: p.Request) -> None:
        """A request that nobody waits for; it may be lost."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Idempotent."""

    # What a driver asks.

    def declare(
        self,
        geometry: p.ScopeGeometry,
        lease_seconds: float = 0.0,
        is_written: Callable[[], bool] = bool,
        model: str = "",
    ) -> None:
        """Name a scope before the first question about it; asks nobody.

        Args:
            geometry: what all clients must agree on.
            lease_seconds: how long clients lease its slots.
            is_written: whether anybody may have written into its slots; asked when the scope is made. A server that makes it anew gives
                no slot then before leases have passed that it knows nothing of.
            model: name of the model whose pages these are, for operators; sent once the server has the
                scope. A server may lack the route.
        """
        with self._lock:
            self._declared[geometry.scope] = _Declared(geometry, lease_seconds, is_written, model)

    def lookup(self, scopes: Sequence[p.LookupScope], call: Call, *, pin_seconds: float = 0.0, touch: bool = True) -> Located:
        """Where pages are, pinned for a time if asked for."""
        request = p.Lookup(scopes=list(scopes), pin_seconds=pin_seconds, touch=touch)
        done = self._ask("/v2/lookup", request, p.LookedUp, call)
        found: list[p.Found] = joined(request, done)
        for share, part in zip(found, scopes, strict=True):
            self._see_slots(part.scope, share.slots)
        return Located(found, [answer.pin for _, answer in done if answer.pin])

    def unpin(self, pins: Sequence[int]) -> None:
        """Let pins go before their time; nobody waits for it."""
        if pins:
            self.send_later("/v2/unpin", p.Unpin(pins=list(pins)))

    def reserve(self, scopes: Sequence[p.ReserveScope], call: Call, *, owner: str, lease_seconds: float) -> p.Leases:
        """Lease slots."""
        request = p.Reserve(scopes=list(scopes), owner=owner, lease_seconds=lease_seconds)
        done = self._ask("/v2/reserve", request, p.Leases, call)
        leased: list[p.Leased] = joined(request, done)
        for share, part in zip(leased, scopes, strict=True):
            self._see_slots(part.scope, share.slots)
        return p.Leases(scopes=leased, lease_seconds=min(answer.lease_seconds for _, answer in done))

    def commit(self, scopes: Sequence[p.CommitScope], call: Call) -> list[list[bool]]:
        """Make pages live; says which are."""
        return self._settle("/v2/commit", p.Commit(scopes=list(scopes)), call)

    def renew(self, scopes: Sequence[p.LeaseScope], call: Call, *, lease_seconds: float) -> list[list[bool]]:
        """Let leases last from now on; says which do."""
        return self._settle("/v2/renew", p.Renew(scopes=list(scopes), lease_seconds=lease_seconds), call)

    def abort(self, scopes: Sequence[p.LeaseScope]) -> None:
        """Give leases back. Nobody waits for it: those that are not given back end by themselves."""
        request = p.Abort(scopes=[part for part in scopes if part.leases])
        if request.scopes:
            for _, piece in pieces(request, self.about.limits):
                self.send_later("/v2/abort", piece)

    def touch(self, scopes: Sequence[p.LookupScope], call: Call) -> list[list[bool]]:
        """Count as use; says which keys are live."""
        request = p.Touch(scopes=list(scopes))
        return [share.done for share in joined(request, self._ask("/v2/touch", request, p.Marked, call))]

    def delete(self, scopes: Sequence[p.DeleteScope], call: Call) -> list[list[bool]]:
        """Make pages go; says which were there."""
        request = p.Delete(scopes=list(scopes))
        return [share.done for share in joined(request, self._ask("/v2/delete", request, p.Marked, call))]

    def inspect(self, scope: str, slots: Sequence[int], call: Call) -> list[p.SlotStatus]:
        """All about some slots."""
        most, found = self.about.limits.keys, list[p.SlotStatus]()
        for start in range(0, len(slots), most):
            request = p.Inspect(scope=scope, slots=list(slots[start : start + most]))
            found += filter(None, self._with_scopes("/v2/inspect", request, [scope], p.Inspected, call).slots)
        return found

    def clear(self, scopes: Sequence[str], call: Call) -> list[int]:
        """Empty scopes; the number of pages that went from each."""
        most, gone = self.about.limits.scopes, list[int]()
        for start in range(0, len(scopes), most):
            request = p.Clear(scopes=list(scopes[start : start + most]))
            gone += self._with_scopes("/v2/clear", request, request.scopes, p.Cleared, call).pages
        return gone

    def drop(self, scopes: Sequence[str], call: Call) -> None:
        """Remove empty scopes; one that is not there is no error.

        Raises:
            InUseError: a slot is live, leased or quarantined.
        """
        for scope in scopes:
            with contextlib.suppress(UnknownScopeError):
                self.send("/v2/drop", p.Drop(scopes=[scope]), p.Dropped, call)
            with self._lock:
                self._made.discard(scope)

    # How.

    def _settle(self, path: str, request: p.Commit | p.Renew, call: Call) -> list[list[bool]]:
        shares = joined(request, self._ask(path, request, p.SettledLeases, call))
        return [[state is p.Settled.DONE for state in share.states] for share in shares]

    def _ask(self, path: str, request: Any, kind: type[A], call: Call) -> list[tuple[list[int], A]]:
        done = list[tuple[list[int], A]]()
        for numbers, piece in pieces(request, self.about.limits):
            answer = self._with_scopes(path, piece, [part.scope for part in piece.scopes], kind, call)
            _see_shape(piece, answer)
            done.append((numbers, answer))
        return done

    def _with_scopes(self, path: str, request: p.Request, scopes: Sequence[str], kind: type[A], call: Call) -> A:
        if not self._made.issuperset(scopes):
            self._make(scopes, call)
        for _ in range(LOSSES):
            try:
                return self.send(path, request, kind, call)
            except UnknownScopeError:
                # The server has lost its memory. What it remembers now may have other limits, too.
                with self._lock:
                    self._made.clear()
                self.refresh(call)
                self._make(scopes, call)
        return self.send(path, request, kind, call)

    def _make(self, scopes: Iterable[str], call: Call) -> None:
        with self._lock:
            wanted = [self._declared[name] for name in dict.fromkeys(scopes) if name not in self._made]
        if wanted:
            geometries = [one.geometry for one in wanted]
            earlier = [one.lease_seconds if one.was_made or one.is_written() else 0.0 for one in wanted]
            # A server that does not know the column yet is not shown an empty one.
            request = p.Initialize(scopes=geometries, earlier_lease_seconds=earlier if any(earlier) else [])
            self.send("/v2/initialize", request, p.Initialized, call)
            with self._lock:
                self._made.update(geometry.scope for geometry in geometries)
                self._declared |= {one.geometry.scope: one._replace(was_made=True) for one in wanted}
            for one in wanted:
                self._describe(one)

    def _describe(self, one: _Declared) -> None:
        if not one.model:
            return
        request = p.Describe(scope=one.geometry.scope, model=one.model)
        # No page depends on it, and a server that lacks the route answers 404.
        with contextlib.suppress(MetadataError):
            self.send_later("/v2/describe", request)

    def _see_slots(self, scope: str, slots: Sequence[int]) -> None:
        if slots and not -1 <= min(slots) <= max(slots) < self._declared[scope].geometry.slots:
            raise MetadataError(f"the metadata server names a slot outside of scope {scope!r}")


class _Declared(NamedTuple):
    """A scope that may be asked about."""

    geometry: p.ScopeGeometry
    lease_seconds: float
    is_written: Callable[[], bool]
    model: str = ""
    was_made: bool = False
    """A server has known it: others may have written since."""


class Located:
    """Answer of `lookup`: one share a scope, and the pins that hold what was found."""

    __slots__ = ("pins", "scopes")

    def __init__(self, scopes: list[p.Found], pins: list[int]) -> None:
        self.scopes = scopes
        self.pins = pins


def _see_shape(request: Any, answer: Any) -> None:
    """Columns as long as the request's, or the answer is none.

    Raises:
        MetadataError: the answer is about something else.
    """
    first = p.COLUMNS[type(request)][0]
    if len(answer.scopes) == len(request.scopes):
        for part, share in zip(request.scopes, answer.scopes, strict=True):
            length = len(getattr(part, first))
            columns = [value for name in share.__struct_fields__ if isinstance(value := getattr(share, name), Sized)]
            if any(len(column) != length for column in columns):
                break
        else:
            return
    raise MetadataError("the metadata server answers about another number of entries than it was asked about")
