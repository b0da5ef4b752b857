"""Snapshot of a running server, taken through `POST /v2/export`.

A server changes between two requests. So each chunk is read twice: a first pass writes all chunks
to a spool file, and a second pass compares their digests. Of a chunk that has changed only those
slots count that held the same page of the same generation in both passes. All these pages were live
at one instant, the one between the two passes; a page that was committed, removed or moved since is
left out. On a server that drains and has no leases, no page is committed or moved, and the second
answer counts.
"""

from __future__ import annotations

import tempfile
import time
from typing import TYPE_CHECKING, BinaryIO, Protocol, Self, TypeVar, cast

from hicache_metadata_server.backup.filters import emptied
from hicache_metadata_server.backup.frames import FrameReader, FrameWriter
from hicache_metadata_server.core.errors import SnapshotError
from hicache_metadata_server.core.export import CHUNK_SLOTS, chunk_digest, parts_of
from hicache_metadata_server.core.snapshot_parts import Counters, EmptySlots, Pages, ScopeHeader
from hicache_metadata_server.protocol import Export, Exported, ScopeGeometry, Scopes

if TYPE_CHECKING:
    from collections.abc import Container, Iterator
    from pathlib import Path

    from hicache_metadata_server.core.snapshot_parts import SnapshotPart
    from hicache_metadata_server.protocol import Answer, Request, ScopeStatus

A = TypeVar("A", bound="Answer")


class ExportServer(Protocol):
    """A server, or an object that answers its routes."""

    def call(self, path: str, request: Request | None, kind: type[A]) -> A:
        """Send a request to a route; return the answer."""
        ...


_ChunkId = tuple[str, int]
"""A scope, and the first slot of one of its chunks."""


class RemoteSource:
    """Snapshot of one server. All methods raise `RemoteError` if the server does not answer.

    Args:
        remote: the server, with a token for administration.
        directory: place of the spool file, which takes as much room as the snapshot.
    """

    def __init__(self, remote: ExportServer, directory: Path) -> None:
        self._remote = remote
        file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed by `__exit__`
        self._file = cast("BinaryIO", file)
        self._writer = FrameWriter(self._file)
        self._spooled: dict[_ChunkId, tuple[int, int, str]] = {}
        """Position of a chunk in the spool, number of its first record, and its digest."""
        self._records = 0
        self._given: dict[_ChunkId, str] = {}
        """Digests of the chunks that `parts` has yielded, for `changed`."""

    def __enter__(self) -> Self:
        """Return the source; no request was sent yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the spool."""
        self._file.close()

    def spool(self) -> int:
        """Run the first pass, while the server serves; return the number of pages."""
        pages = 0
        for scope in self._scopes():
            for first, answer in _chunks(self._remote, scope.scope):
                pages += len(answer.slots)
                self._put((scope.scope, first), answer)
        return pages

    def parts(self, *, drained: bool) -> Iterator[SnapshotPart]:
        """Run the second pass: yield the snapshot, once it is spooled."""
        # A scope that was created since the first pass has no chunks in the spool: only its header
        # is yielded, unless the server drains.
        counters = Counters()
        self._given = {}
        for scope in self._scopes():
            name, head = scope.scope, self._summary(scope.scope, 0)
            yield ScopeHeader(_geometry(scope), head.epoch, head.tenant, scope.model)
            first, answer = 0, head
            while first < answer.used:
                yield from self._second(name, first, answer.digest, drained=drained)
                first += CHUNK_SLOTS
                answer = self._summary(name, first)
            # Taken last: leases and pins that were given meanwhile are below them.
            counters = Counters(
                max(counters.lease, answer.next_lease), max(counters.pin, answer.next_pin)
            )
        yield counters

    def changed(self) -> list[str]:
        """Return the scopes of which a slot has changed since `parts` has yielded it."""
        found = dict[str, None]()
        for (name, first), digest in self._given.items():
            if self._summary(name, first).digest != digest:
                found[name] = None
        # A new scope without pages is no loss.
        known = {name for name, _ in self._given}
        return [*found, *(s.scope for s in self._scopes() if s.live and s.scope not in known)]

    def _second(
        self, name: str, first: int, digest: str, *, drained: bool
    ) -> Iterator[SnapshotPart]:
        spooled = self._spooled.get((name, first))
        if spooled is None and not drained:
            # Used for the first time since the first pass.
            return
        if spooled is not None and spooled[2] == digest:
            pages, empty = self._read(*spooled[:2])
        else:
            pages, empty = _decoded(_export(self._remote, name, first, rows=True))
            if spooled is not None and not drained:
                before = self._read(*spooled[:2])[0]
                known = dict(zip(before.slots, before.generations, strict=True))
                # A generation of a slot is one page, at one time: if both passes have seen it, it
                # was live all the time between them.
                same = [
                    known.get(slot) == held
                    for slot, held in zip(pages.slots, pages.generations, strict=True)
                ]
                pages, gone = pages.partition(same.__getitem__)
                yield emptied(gone)
        self._given[name, first] = chunk_digest(pages, empty)
        yield pages
        yield empty

    def _put(self, place: _ChunkId, answer: Exported) -> None:
        pages, empty = _decoded(answer)
        # On disk: a large server's pages do not fit into the memory of a command.
        at = self._writer.write(pages)
        self._writer.write(empty)
        self._spooled[place] = at, self._records, answer.digest
        self._records += 2

    def _read(self, at: int, number: int) -> tuple[Pages, EmptySlots]:
        self._file.flush()
        # Reader and writer share the file, whose position is the writer's.
        here = self._file.tell()
        self._file.seek(at)
        reader = FrameReader(self._file, number)
        pages, empty = reader.read(), reader.read()
        self._file.seek(here)
        assert isinstance(pages, Pages), "the first record of a chunk"
        assert isinstance(empty, EmptySlots), "the second"
        return pages, empty

    def _summary(self, name: str, first: int) -> Exported:
        return _export(self._remote, name, first, rows=False)

    def _scopes(self) -> list[ScopeStatus]:
        return _scopes(self._remote)


def served(remote: ExportServer, wanted: Container[str]) -> Iterator[SnapshotPart]:
    """Yield the live pages of a server, each as of its own request; no counters and empty slots.

    Raises:
        RemoteError: the server does not answer.
        SnapshotError: an answer contradicts itself.
    """
    for scope in _scopes(remote):
        if scope.scope in wanted:
            yield ScopeHeader(_geometry(scope))
            for _, answer in _chunks(remote, scope.scope):
                yield _decoded(answer)[0]


def _chunks(remote: ExportServer, name: str) -> Iterator[tuple[int, Exported]]:
    """Yield all chunks of a scope, each with its first slot."""
    first, used = 0, 1
    while first < used:
        answer = _export(remote, name, first, rows=True)
        used = answer.used
        yield first, answer
        first += CHUNK_SLOTS


def _export(remote: ExportServer, name: str, first: int, *, rows: bool) -> Exported:
    return remote.call(
        "/v2/export", Export(scope=name, first=first, count=CHUNK_SLOTS, rows=rows), Exported
    )


def _decoded(answer: Exported) -> tuple[Pages, EmptySlots]:
    try:
        return parts_of(answer, time.time())
    except ValueError as error:
        raise SnapshotError(f"the server's answer contradicts itself: {error}") from error


def _scopes(remote: ExportServer) -> list[ScopeStatus]:
    return remote.call("/v2/scopes", None, Scopes).scopes


def _geometry(scope: ScopeStatus) -> ScopeGeometry:
    return ScopeGeometry(
        scope=scope.scope,
        slots=scope.slots,
        slot_bytes=scope.slot_bytes,
        geometry=scope.geometry,
        identity=scope.identity,
    )
