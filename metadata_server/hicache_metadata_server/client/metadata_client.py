"""Abstract metadata client: maps pages to slots, on several scopes with each request."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from msgspec import structs

from hicache_metadata_server import protocol as p
from hicache_metadata_server.client.errors import MetadataError, UnknownScopeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hicache_storage.objects import Call

A = TypeVar("A", bound=p.Answer)

MAX_REINITIALIZATIONS: Final = 2
"""Of scopes that the server has lost, in one call."""


class MetadataClient(ABC):
    """Base class of metadata clients. Safe for many threads.

    Initializes scopes at their first use, and again when the server has lost them. Splits long
    requests and checks the shape of responses. Every operation ends by the call's deadline.

    Raises:
        StorageUnavailableError: from any operation that has failed.
    """

    def __init__(self) -> None:
        self.owner = ""
        """Name of this client, for operators."""
        self._declared: dict[str, _Declared] = {}
        self._initialized = set[str]()
        self._lock = threading.Lock()

    # Implemented by each client.

    @property
    @abstractmethod
    def about(self) -> p.About:
        """ServerEndpoint information of the last `refresh`."""

    @property
    def endpoint(self) -> str:
        """Description of the server in use, for logs; empty without a server."""
        return ""

    @abstractmethod
    def refresh(self, call: Call) -> p.About:
        """Request the server's information and limits."""

    def problem(self) -> str:
        """Request the reason that the server in use takes no changes; empty if it does."""
        return ""

    @abstractmethod
    def send(self, path: str, request: p.Request, response_type: type[A], call: Call) -> A:
        """Send one request that is within the limits. A change is made once, despite retries."""

    @abstractmethod
    def send_later(self, path: str, request: p.Request) -> None:
        """Send a request without waiting for its response. The request may be lost."""

    @abstractmethod
    def close(self) -> None:
        """Release connections, threads and state. Idempotent."""

    # Called by the driver.

    def declare(
        self,
        geometry: p.ScopeGeometry,
        lease_seconds: float = 0.0,
        is_written: Callable[[], bool] = bool,
        model: str = "",
    ) -> None:
        """Declare a scope before its first operation. Sends nothing.

        Args:
            geometry: slots, bytes and identity, equal for all clients.
            lease_seconds: length of the leases of its slots.
            is_written: called when the scope is initialized; True if any client may have written
                into its slots. The server then gives no slot until unknown leases have ended.
            model: name of the model whose pages these are, for operators; sent once the server has
                the scope.
        """
        with self._lock:
            self._declared[geometry.scope] = _Declared(geometry, lease_seconds, is_written, model)

    def initialize(self, scopes: Sequence[str], call: Call) -> None:
        """Initialize declared scopes. Sends nothing for those that a server has already."""
        if not self._initialized.issuperset(scopes):
            self._initialize(scopes, call)

    def lookup(
        self, scopes: Sequence[p.LookupScope], call: Call, *, touch: bool = True
    ) -> list[p.FoundPages]:
        """Look up the slots of pages, for each scope."""
        request = p.Lookup(scopes=list(scopes), touch=touch)
        found = self._send_split("/v2/lookup", request, p.LookedUp, call)
        for columns, part in zip(found.scopes, scopes, strict=True):
            self._check_slots(part.scope, columns.slots)
        return found.scopes

    def reserve(
        self, scopes: Sequence[p.ReserveScope], call: Call, *, lease_seconds: float
    ) -> p.Leases:
        """Lease slots."""
        request = p.Reserve(scopes=list(scopes), owner=self.owner, lease_seconds=lease_seconds)
        leased = self._send_split("/v2/reserve", request, p.Leases, call)
        for columns, part in zip(leased.scopes, scopes, strict=True):
            self._check_slots(part.scope, columns.slots)
        return leased

    def commit(self, scopes: Sequence[p.CommitScope], call: Call) -> list[list[bool]]:
        """Make pages live. False for each lease that is not held any more."""
        return self._settle("/v2/commit", p.Commit(scopes=list(scopes)), call)

    def renew(
        self, scopes: Sequence[p.LeaseScope], call: Call, *, lease_seconds: float
    ) -> list[list[bool]]:
        """Renew leases from now on. False for each lease that is not held any more."""
        return self._settle(
            "/v2/renew", p.Renew(scopes=list(scopes), lease_seconds=lease_seconds), call
        )

    def abort(self, scopes: Sequence[p.LeaseScope]) -> None:
        """Give leases back, without waiting for the response: lost ones end by themselves."""
        request = p.Abort(scopes=[part for part in scopes if part.leases])
        if request.scopes:
            for _, chunk in self._chunks(request):
                self.send_later("/v2/abort", chunk)

    def delete(self, scopes: Sequence[p.DeleteScope], call: Call) -> list[list[bool]]:
        """Delete pages. False for each key that was not live."""
        request = p.Delete(scopes=list(scopes), owner=self.owner)
        marked = self._send_split("/v2/delete", request, p.Marked, call)
        return [scope.done for scope in marked.scopes]

    def inspect(self, scope: str, slots: Sequence[int], call: Call) -> list[p.SlotStatus]:
        """Request the status of slots."""
        limit, found = self.about.limits.keys, list[p.SlotStatus]()
        for start in range(0, len(slots), limit):
            request = p.Inspect(scope=scope, slots=list(slots[start : start + limit]))
            found += filter(
                None, self._with_scopes("/v2/inspect", request, [scope], p.Inspected, call).slots
            )
        return found

    def clear(self, scopes: Sequence[str], call: Call) -> list[int]:
        """Delete all pages of scopes, and return their number for each scope."""
        limit, deleted = self.about.limits.scopes, list[int]()
        for start in range(0, len(scopes), limit):
            some = list(scopes[start : start + limit])
            request = p.Clear(scopes=some, owner=self.owner)
            deleted += self._with_scopes(
                "/v2/clear", request, request.scopes, p.Cleared, call
            ).pages
        return deleted

    def removals(
        self, cursors: dict[str, str | None], call: Call
    ) -> Iterator[tuple[str, p.RemovedPages]]:
        """Yield removals behind cursors of scopes, which it moves, until none is left."""
        left = list(cursors)
        while left:
            some = left[: self.about.limits.scopes]
            left = left[len(some) :]
            asked = [p.RemovalCursor(scope=name, cursor=cursors[name]) for name in some]
            request = p.CollectRemovals(scopes=asked)
            answer = self._with_scopes("/v2/removals", request, some, p.CollectedRemovals, call)
            for name, part in zip(some, answer.scopes, strict=True):
                cursors[name] = part.cursor
                left += [name] * part.more
                yield name, part

    def drop(self, scopes: Sequence[str], call: Call) -> None:
        """Remove empty scopes. A scope that does not exist is no error.

        Raises:
            InUseError: a slot is live, leased or quarantined.
        """
        for scope in scopes:
            with contextlib.suppress(UnknownScopeError):
                self.send("/v2/drop", p.Drop(scopes=[scope]), p.Dropped, call)
            with self._lock:
                self._initialized.discard(scope)

    # Implementation.

    def _settle(self, path: str, request: p.Commit | p.Renew, call: Call) -> list[list[bool]]:
        settled = self._send_split(path, request, p.SettledLeases, call)
        return [[state is p.Settled.DONE for state in scope.states] for scope in settled.scopes]

    def _send_split(self, path: str, request: Any, response_type: type[A], call: Call) -> A:
        """Send a request in chunks that are within the limits; returns the response as if one
        request had been sent."""
        done = list[tuple[int, Any, A]]()
        for number, chunk in self._chunks(request):
            scopes = [part.scope for part in chunk.scopes]
            response = self._with_scopes(path, chunk, scopes, response_type, call)
            _check_shape(chunk, response)
            done.append((number, chunk, response))
        return done[0][2] if len(done) == 1 else _joined(done)

    def _chunks(self, request: Any) -> list[tuple[int, Any]]:
        limits, columns, parts = self.about.limits, p.COLUMNS[type(request)], request.scopes
        entries = sum(len(getattr(part, columns[0])) for part in parts)
        most = _max_entries(parts, columns, limits)
        if len(parts) <= limits.scopes and entries <= most:
            return [(0, request)]
        return _cut(request, most)

    def _with_scopes(
        self,
        path: str,
        request: p.Request,
        scopes: Sequence[str],
        response_type: type[A],
        call: Call,
    ) -> A:
        self.initialize(scopes, call)
        # Bounded: servers with separate stores would send a client back and forth for ever.
        for _ in range(MAX_REINITIALIZATIONS):
            try:
                return self.send(path, request, response_type, call)
            except UnknownScopeError:
                # The server has lost its state. It may have other limits now, too.
                with self._lock:
                    self._initialized.clear()
                self.refresh(call)
                self._initialize(scopes, call)
        return self.send(path, request, response_type, call)

    def _initialize(self, scopes: Iterable[str], call: Call) -> None:
        with self._lock:
            wanted = [
                self._declared[name]
                for name in dict.fromkeys(scopes)
                if name not in self._initialized
            ]
        # Without the lock: two threads may initialize a scope at once, which does no harm, and no
        # thread waits for the request of another.
        if wanted:
            geometries = [one.geometry for one in wanted]
            earlier = [
                one.lease_seconds if one.was_initialized or one.is_written() else 0.0
                for one in wanted
            ]
            request = p.Initialize(scopes=geometries, earlier_lease_seconds=earlier)
            self.send("/v2/initialize", request, p.Initialized, call)
            with self._lock:
                self._initialized.update(geometry.scope for geometry in geometries)
                self._declared |= {
                    one.geometry.scope: one._replace(was_initialized=True) for one in wanted
                }
            for one in (one for one in wanted if one.model):
                described = p.Describe(scope=one.geometry.scope, model=one.model)
                # No page depends on it.
                with contextlib.suppress(MetadataError):
                    self.send_later("/v2/describe", described)

    def _check_slots(self, scope: str, slots: Sequence[int]) -> None:
        if slots and not -1 <= min(slots) <= max(slots) < self._declared[scope].geometry.slots:
            raise MetadataError(f"the metadata server names a slot outside of scope {scope!r}")


class _Declared(NamedTuple):
    """A declared scope."""

    geometry: p.ScopeGeometry
    lease_seconds: float
    is_written: Callable[[], bool]
    model: str = ""
    was_initialized: bool = False
    """A server has known the scope, so other clients may have written into it since."""


def _check_shape(request: Any, response: Any) -> None:
    """Raise MetadataError unless a response has the scopes and columns of its request."""
    first = p.COLUMNS[type(request)][0]
    lengths = [len(getattr(part, first)) for part in request.scopes]
    if len(lengths) != len(response.scopes) or any(
        isinstance(column := getattr(found, name), Sized) and len(column) != length
        for length, found in zip(lengths, response.scopes, strict=True)
        for name in found.__struct_fields__
    ):
        raise MetadataError(
            "the metadata server answers about another number of entries than it was asked about"
        )


def _max_entries(parts: Sequence[Any], columns: tuple[str, ...], limits: p.Limits) -> int:
    longest = 20
    for name in columns:
        for part in parts:
            column = getattr(part, name)
            if column and isinstance(column[0], str):
                # UTF-8 takes four bytes a character at most.
                longest = max(longest, 4 * max(map(len, column)))
    # An estimate from above: names of scopes and fields take less than 1 KiB for each scope.
    room = limits.body_bytes - 1024 * min(len(parts), limits.scopes)
    return max(1, min(limits.keys, room // (len(columns) * (longest + 8))))


def _cut(request: Any, max_entries: int) -> list[tuple[int, Any]]:
    """Cut a long request into requests about one scope each, in the order in which to send them.

    Each is behind the index of its scope. A scope without entries gets one, so that the response
    has an entry for it.
    """
    columns, chunks = p.COLUMNS[type(request)], list[tuple[int, Any]]()
    for number, part in enumerate(request.scopes):
        for start in range(0, max(1, len(getattr(part, columns[0]))), max_entries):
            cut = {name: getattr(part, name)[start : start + max_entries] for name in columns}
            chunks.append((number, structs.replace(request, scopes=[structs.replace(part, **cut)])))
    # The keys of a lookup count as used from the last to the first, and so do its chunks.
    return chunks[::-1] if isinstance(request, p.Lookup) else chunks


def _joined(done: Sequence[tuple[int, Any, Any]]) -> Any:
    """Join the responses to all chunks into one response."""
    _, first, response = done[0]
    scopes = dict[int, list[Any]]()
    for number, _, one in reversed(done) if isinstance(first, p.Lookup) else done:
        scopes.setdefault(number, []).append(one.scopes[0])
    joined = structs.replace(response, scopes=[_merged(some) for some in scopes.values()])
    if isinstance(joined, p.Leases):
        return structs.replace(joined, lease_seconds=min(one.lease_seconds for *_, one in done))
    return joined


def _merged(responses: Sequence[Any]) -> Any:
    """Merge the responses for one scope: columns are concatenated, counts are added."""
    # By type, not by name: a new column or count needs no change here.
    fields = {
        name: [getattr(response, name) for response in responses]
        for name in responses[0].__struct_fields__
    }
    return structs.replace(
        responses[0],
        **{
            name: sum(values)
            if isinstance(values[0], int)
            else [entry for column in values for entry in column]
            for name, values in fields.items()
        },
    )
