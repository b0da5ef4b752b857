"""Import of the persistence file of SGLang's metadata server."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hicache_metadata_server.core.codec import SlotColumns
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.restore import restore
from hicache_metadata_server.core.slot_table import LIVE
from hicache_metadata_server.core.tenants import NAME
from hicache_metadata_server.protocol import Limits, ScopeGeometry

if TYPE_CHECKING:
    from hicache_metadata_server.core.service import MetadataService

_SCOPE: Final = re.compile(r"([0-9]{1,9})(?::([A-Za-z0-9._-]{1,128}))?", re.ASCII)


class ImportFileError(ValueError):
    """The file cannot be imported."""


class _Rank(msgspec.Struct):
    num_pages: int
    free_pages: list[Any]
    key_to_index: list[tuple[Any, Any]] | dict[str, Any]


@dataclass(slots=True)
class ImportedScope:
    """One scope of the file, without contradictory keys."""

    name: str
    slots: int
    pages: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Keys and slots, the least recently used first."""
    dropped: Counter[str] = field(default_factory=Counter[str])
    """Number of dropped keys by reason."""
    lost: int = 0
    """Slots that were neither free nor of a key; they are free now."""


def read_persistence_file(body: bytes, limits: Limits = DEFAULTS) -> list[ImportedScope]:
    """Read the scopes of a file: `{"rank:namespace": ...}`, or bare ranks for `rank:kv`.

    Raises:
        ImportFileError: the file has another format.
    """
    try:
        found = msgspec.json.decode(body, type=dict[str, _Rank])
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ImportFileError(
            f"this is no persistence file of SGLang's metadata server: {error}"
        ) from error
    scopes: dict[str, ImportedScope] = {}
    for text, rank in found.items():
        match = _SCOPE.fullmatch(text)
        if match is None:
            raise ImportFileError(f"{text!r} is no rank, nor a rank and a namespace")
        name = f"{int(match[1])}:{match[2] or 'kv'}"
        if name in scopes:
            raise ImportFileError(f"scope {name} stands in the file twice")
        if not 1 <= rank.num_pages <= 2**40:
            raise ImportFileError(f"scope {name} has {rank.num_pages} pages")
        scopes[name] = _checked(name, rank, limits)
    return list(scopes.values())


def _checked(name: str, rank: _Rank, limits: Limits) -> ImportedScope:
    """Drop the keys of pages with unknown contents, and of malformed entries."""
    # The bytes of a page that two keys name, or that is free as well, are unknown: a key could read
    # those of another page.
    pairs = (
        list(rank.key_to_index.items())
        if isinstance(rank.key_to_index, dict)
        else rank.key_to_index
    )
    scope = ImportedScope(name, rank.num_pages)
    free = {page for page in rank.free_pages if _is_page(page, rank.num_pages)}
    pages = Counter(page for _, page in pairs if _is_page(page, rank.num_pages))
    keys = Counter(key for key, _ in pairs if isinstance(key, str))
    for key, page in pairs:
        if not isinstance(key, str) or not 1 <= len(key.encode()) <= limits.key_bytes:
            scope.dropped["no key, or longer than the limit"] += 1
        elif not _is_page(page, rank.num_pages):
            scope.dropped["a page outside the file"] += 1
        elif keys[key] > 1:
            scope.dropped["a key that stands several times"] += 1
        elif pages[page] > 1:
            scope.dropped["a page of several keys"] += 1
        elif page in free:
            scope.dropped["a page that is free as well"] += 1
        else:
            scope.pages.append((key, page))
    scope.lost = rank.num_pages - len(free | pages.keys())
    return scope


def _is_page(page: object, pages: int) -> bool:
    return isinstance(page, int) and not isinstance(page, bool) and 0 <= page < pages


def import_scopes(
    service: MetadataService, scopes: list[ImportedScope], now: float, tenant: str = ""
) -> None:
    """Create the scopes in a service, for one tenant or none.

    Raises:
        ImportFileError: a scope exists already, or the tenant's name is invalid; nothing was
            imported.
    """
    if tenant and not re.fullmatch(NAME, tenant):
        raise ImportFileError(f"a tenant is called {NAME}, not {tenant!r}")
    there = [scope.name for scope in scopes if scope.name in service.scopes]
    if there:
        raise ImportFileError(f"the store has {', '.join(there)} already; nothing was imported")
    for imported in scopes:
        scope = service.add_scope(ScopeGeometry(scope=imported.name, slots=imported.slots), tenant)
        first = service.take_leases(len(imported.pages))
        columns = SlotColumns(1 + max((slot for _, slot in imported.pages), default=-1))
        for lease, (key, slot) in enumerate(imported.pages, first):
            columns.states[slot] = LIVE
            columns.generations[slot] = 1
            columns.leases[slot] = lease
            columns.keys[slot] = key
        problems = restore(scope, columns, now, service.limits.max_lease_seconds)
        assert not problems, "what contradicts itself was dropped before"
        scope = service.find(imported.name)
        scope.changed = [[slot for _, slot in imported.pages]] if imported.pages else []
        scope.leased = scope.changed[:]
