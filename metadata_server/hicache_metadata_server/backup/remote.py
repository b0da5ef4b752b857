"""A snapshot of a server that runs, taken through `POST /v2/export`.

A server that serves changes between two requests. So each piece is asked for twice: first all of
it, into a spool; then, when all pieces are there, whether it has changed. Of a piece that has, only
the slots count that hold the same page of the same generation both times. What is left was live at
one instant, the one between the two rounds: a page that has come, gone or moved since is left out.
Of a server that drains and whose leases have ended nothing comes or moves, and the second answer
counts.
"""

from __future__ import annotations

import tempfile
import time
from typing import TYPE_CHECKING, BinaryIO, Protocol, Self, TypeVar, cast

from hicache_metadata_server.backup.capture import CHUNK_SLOTS
from hicache_metadata_server.backup.export_messages import chunk_digest, parts_of
from hicache_metadata_server.backup.filters import emptied
from hicache_metadata_server.backup.frames import FrameReader, FrameWriter
from hicache_metadata_server.backup.parts import (
    Counters,
    EmptySlots,
    Pages,
    ScopeHeader,
    SnapshotError,
)
from hicache_metadata_server.protocol import Export, Exported, ScopeGeometry, Scopes

if TYPE_CHECKING:
    from collections.abc import Container, Iterator
    from pathlib import Path
    from types import TracebackType

    from hicache_metadata_server.backup.parts import SnapshotPart
    from hicache_metadata_server.protocol import Answer, Request, ScopeStatus

A = TypeVar("A", bound="Answer")


class ExportServer(Protocol):
    """A server, or what answers like one."""

    def call(self, path: str, request: Request | None, kind: type[A]) -> A:
        """The answer of a route."""
        ...


_ChunkId = tuple[str, int]
"""A scope and the first slot of a piece of it."""


class RemoteSource:
    """Takes one snapshot of one server. All methods raise `RemoteError` where it does not answer.

    Args:
        remote: with a token that permits to administer.
        directory: where the spool lies, as long as the snapshot.
    """

    def __init__(self, remote: ExportServer, directory: Path) -> None:
        self._remote = remote
        self._file = cast("BinaryIO", tempfile.TemporaryFile(dir=directory))  # noqa: SIM115 - closed by `__exit__`
        self._writer = FrameWriter(self._file)
        self._spooled: dict[_ChunkId, tuple[int, int, str]] = {}
        """Where a piece stands in the spool, the number of its first record, and its digest."""
        self._records = 0
        self._given: dict[_ChunkId, str] = {}
        """The digests of the pieces as they were given, for `changed`."""

    def __enter__(self) -> Self:
        """Nothing is asked for yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove the spool."""
        self._file.close()

    def spool(self) -> int:
        """Take down everything, while the server serves; returns the number of pages."""
        pages = 0
        for scope in self._scopes():
            for first, answer in _chunks(self._remote, scope.scope):
                pages += len(answer.slots)
                self._put((scope.scope, first), answer)
        return pages

    def parts(self, *, drained: bool) -> Iterator[SnapshotPart]:
        """The snapshot, once it is spooled."""
        counters = Counters()
        self._given = {}
        for scope in self._scopes():
            name, told = scope.scope, self._told(scope.scope, 0)
            yield ScopeHeader(_geometry(scope), told.epoch, told.tenant, scope.model)
            first, answer = 0, told
            while first < answer.used:
                yield from self._second(name, first, answer.digest, drained=drained)
                first += CHUNK_SLOTS
                answer = self._told(name, first)
            counters = Counters(
                max(counters.lease, answer.next_lease), max(counters.pin, answer.next_pin)
            )
        yield counters

    def changed(self) -> list[str]:
        """The scopes in which something has come or gone since `parts` gave it."""
        found = dict[str, None]()
        for (name, first), digest in self._given.items():
            if self._told(name, first).digest != digest:
                found[name] = None
        known = {name for name, _ in self._given}
        return [*found, *(s.scope for s in self._scopes() if s.live and s.scope not in known)]

    def _second(
        self, name: str, first: int, digest: str, *, drained: bool
    ) -> Iterator[SnapshotPart]:
        spooled = self._spooled.get((name, first))
        if spooled is None and not drained:
            return
        if spooled is not None and spooled[2] == digest:
            pages, empty = self._read(*spooled[:2])
        else:
            pages, empty = _decoded(_export(self._remote, name, first, rows=True))
            if spooled is not None and not drained:
                before = self._read(*spooled[:2])[0]
                known = dict(zip(before.slots, before.generations, strict=True))
                # In its slot a generation holds one page at most, and holds it once.
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
        at = self._writer.write(pages)
        self._writer.write(empty)
        self._spooled[place] = at, self._records, answer.digest
        self._records += 2

    def _read(self, at: int, number: int) -> tuple[Pages, EmptySlots]:
        self._file.flush()
        here = self._file.tell()
        self._file.seek(at)
        reader = FrameReader(self._file, number)
        pages, empty = reader.read(), reader.read()
        self._file.seek(here)
        assert isinstance(pages, Pages), "the first record of a piece"
        assert isinstance(empty, EmptySlots), "the second"
        return pages, empty

    def _told(self, name: str, first: int) -> Exported:
        return _export(self._remote, name, first, rows=False)

    def _scopes(self) -> list[ScopeStatus]:
        return _scopes(self._remote)


def served(remote: ExportServer, wanted: Container[str]) -> Iterator[SnapshotPart]:
    """The live pages of a server as they go by: each was there when it was asked for. No counters,
    and nothing of other slots.

    Raises:
        RemoteError: it does not answer.
        SnapshotError: its answer contradicts itself.
    """
    for scope in _scopes(remote):
        if scope.scope in wanted:
            yield ScopeHeader(_geometry(scope))
            for _, answer in _chunks(remote, scope.scope):
                yield _decoded(answer)[0]


def _chunks(remote: ExportServer, name: str) -> Iterator[tuple[int, Exported]]:
    """All of a scope, by the first slot of each piece."""
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
