"""Consistency check of a shared store.

One script checks the slots of one chunk atomically; requests are served between two scripts.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.chunking import CHUNK_ENTRIES
from hicache_metadata_server.core.invariants import MAX_WHOLE_SLOTS, SHOWN
from hicache_metadata_server.core.limits import Measure
from hicache_metadata_server.core.tenants import ANYBODY, Caller, may_use
from hicache_metadata_server.shared.catalog import ScriptTask
from hicache_metadata_server.shared.scripts import value_of

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from hicache_metadata_server.shared.catalog import ScopeCatalog
    from hicache_metadata_server.shared.service import SharedService

_INDEXES: Final = ("live", "leased", "leases", "free", "expiring", "order", "aside", "resting")
# Counts over a whole scope are taken by many scripts, and pages come and go between them. A real
# error stays the same; one of timing does not survive three passes.
_PASSES: Final = 3


async def fsck(service: SharedService, request: p.Fsck, caller: Caller = ANYBODY) -> p.FsckReport:
    """Check every invariant of the named scopes, or of all that the caller may use."""
    Measure(service.limits).scopes(request.scopes)
    catalog = service.catalog
    if not request.scopes:
        await catalog.refresh()
    names = request.scopes or sorted(
        name for name, known in catalog.known.items() if may_use(caller, known.tenant)
    )
    known = await catalog.find(names, [f"scopes[{i}]" for i in range(len(names))])
    problems = list[str]()
    for name in names:
        problems += [f"{name}: {problem}" for problem in await _scope(catalog, name)]
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    return p.FsckReport(
        slots=sum(one.geometry.slots for one in known), problems=problems[:SHOWN] + more
    )


async def _scope(catalog: ScopeCatalog, name: str) -> list[str]:
    used: int
    problems: list[str]
    used, problems = await _ask(catalog, name, "audit_counts", ())
    wrong_counts = bool(problems)
    found, named = await _slots(catalog, name, used)
    problems += found
    # An index with a surplus entry leads to no slot, so that the pass over the slots cannot find
    # the entry. Going through the indexes is slow, and only wrong counts call for it.
    if wrong_counts:
        for index in _INDEXES:
            problems += await _index(catalog, name, index)
    # The check of the prefix counts needs all prefixes in memory.
    if used <= MAX_WHOLE_SLOTS:
        problems += sorted(await _children(catalog, name, named))
    return problems


async def _slots(catalog: ScopeCatalog, name: str, used: int) -> tuple[list[str], Counter[str]]:
    """Return the problems of the slots, and the number of live pages for each prefix."""
    problems, named = list[str](), Counter[str]()
    for start in range(0, used, CHUNK_ENTRIES):
        _, found, prefixes = await _ask(catalog, name, "audit_slots", (start, CHUNK_ENTRIES))
        problems += found
        if used <= MAX_WHOLE_SLOTS:
            named.update(prefixes)
    return problems, named


async def _index(catalog: ScopeCatalog, name: str, index: str) -> list[str]:
    problems, cursor = list[str](), "0"
    while True:
        cursor, found = await _ask(catalog, name, "audit_index", (index, cursor))
        problems += found
        if cursor == "0":
            # A scan of Redis may return an entry twice.
            return list(dict.fromkeys(problems))


async def _children(catalog: ScopeCatalog, name: str, named: Counter[str]) -> AbstractSet[str]:
    wrong = await _miscounted(catalog, name, named)
    for _ in range(_PASSES - 1):
        if not wrong:
            break
        used, _ = await _ask(catalog, name, "audit_counts", ())
        _, named = await _slots(catalog, name, used)
        wrong &= await _miscounted(catalog, name, named)
    return wrong


async def _miscounted(catalog: ScopeCatalog, name: str, named: Counter[str]) -> set[str]:
    counted, cursor = dict[str, int](), "0"
    while True:
        cursor, entries = await _ask(catalog, name, "audit_index", ("children", cursor))
        counted |= {key: int(count) for key, count in zip(entries[::2], entries[1::2], strict=True)}
        if cursor == "0":
            break
    return {
        f"{named[key]} live pages have the prefix {key!r}, and {counted.get(key, 0)} are counted"
        for key in named.keys() | counted.keys()
        if named[key] != counted.get(key, 0)
    }


async def _ask(catalog: ScopeCatalog, scope: str, script: str, arguments: tuple[Any, ...]) -> Any:
    (reply,) = await catalog.run([ScriptTask(script, scope, "scopes", arguments)])
    return value_of(reply)
