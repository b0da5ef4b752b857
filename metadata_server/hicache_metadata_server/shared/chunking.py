"""Translation between chunks of requests and scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.chunking import chunks_of
from hicache_metadata_server.shared.catalog import ScriptTask
from hicache_metadata_server.shared.scripts import columns_of, exact, pages_of, value_of

if TYPE_CHECKING:
    from hicache_metadata_server.core.chunking import Chunk

_RESERVED: Final = (p.Reserved.LEASED, p.Reserved.EXISTS, p.Reserved.BUSY, p.Reserved.FULL)


def in_order(request: Any) -> list[Chunk]:
    """Return the chunks of a request, scopes in the order of the request."""
    # A stable sort: within a scope the order of `chunks_of` stays. Where keys count as used from
    # the last to the first, it yields the last chunk first.
    return sorted(chunks_of(request), key=lambda chunk: chunk.scope)


def task_of(chunk: Chunk, number: int, lasts: int, pin: int, *, draining: bool) -> ScriptTask:
    """Return the script of a chunk.

    Args:
        chunk: the chunk.
        number: its number within the request.
        lasts: duration of a lease or a pin, in microseconds.
        pin: number of the pin that a lookup takes; 0 for none.
        draining: true if the server gives no new leases.
    """
    request, pages = chunk.request, b""
    part = request.scopes[0]
    arguments: object
    match request:
        case p.Lookup():
            arguments, name = (
                (part.keys, request.touch, f"{pin}.{number}" if pin else "", lasts),
                "lookup",
            )
        case p.Touch():
            arguments, name = (part.keys, True, False), "find"
        case p.Reserve():
            arguments, name = (part.keys, part.prefixes, request.owner, lasts, draining), "reserve"
        case p.Commit():
            arguments, name, pages = (
                exact(part.leases),
                "commit",
                pages_of(part.lengths, part.checksums),
            )
        case p.Abort():
            arguments, name = exact(part.leases), "abort"
        case p.Renew():
            arguments, name = (exact(part.leases), lasts), "renew"
        case _:
            arguments, name = (part.keys, exact(part.generations)), "delete"
    return ScriptTask(
        name, part.scope, f"scopes[{chunk.scope}].scope", arguments, pages, str(number)
    )


def answer_of(request: Any, reply: list[Any], seconds: float) -> Any:
    """Return the answer to a chunk, from the reply of its script."""
    value = value_of(reply)
    match request:
        case p.Lookup():
            lengths, checksums = columns_of(reply[2])
            found = p.FoundPages(
                slots=value[0], generations=value[1], lengths=lengths, checksums=checksums
            )
            return p.LookedUp(scopes=[found])
        case p.Touch():
            return p.Marked(scopes=[p.Flags(done=[slot >= 0 for slot in value])])
        case p.Reserve():
            states, slots, generations, leases, evicted = value
            named: list[p.Reserved] = [_RESERVED[int(state)] for state in states]
            leased = p.Leased(
                states=named, slots=slots, generations=generations, leases=leases, evicted=evicted
            )
            return p.Leases(scopes=[leased], lease_seconds=seconds)
        case p.Delete():
            return p.Marked(scopes=[p.Flags(done=value)])
        case _:
            states = [p.Settled.DONE if done else p.Settled.STALE for done in value]
            return p.SettledLeases(scopes=[p.SettledScope(states=states)])


def empty_answer(request: Any, seconds: float) -> Any:
    """Return the answer to a request without scopes."""
    match request:
        case p.Lookup():
            return p.LookedUp(scopes=[])
        case p.Touch() | p.Delete():
            return p.Marked(scopes=[])
        case p.Reserve():
            return p.Leases(scopes=[], lease_seconds=seconds)
        case _:
            return p.SettledLeases(scopes=[])
