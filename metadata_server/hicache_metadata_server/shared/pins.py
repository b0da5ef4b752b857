"""Registry of pins, each of which is one number for slots of several scopes."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.core.chunking import batched
from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.core.tenants import ANYBODY, Caller, may_use
from hicache_metadata_server.shared.catalog import ScriptTask
from hicache_metadata_server.shared.chunking import in_order
from hicache_metadata_server.shared.names import pin_key
from hicache_metadata_server.shared.scripts import EXACT, packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_metadata_server import protocol as p
    from hicache_metadata_server.shared.catalog import ScopeCatalog

# Redis executes one command at a time, and serves other clients between two batches.
_AT_ONCE: Final = 64


class PinRegistry:
    """Registry of the scopes of each pin. Each scope itself has the slots and the end of a pin."""

    def __init__(self, catalog: ScopeCatalog) -> None:
        self._catalog = catalog

    def draw(self) -> int:
        """Return a random number for a pin."""
        # Random rather than counted: servers would have to agree on a counter, and `enter` finds
        # the rare number that is taken.
        return 1 + secrets.randbelow(EXACT - 1)

    async def enter(self, pin: int, request: p.Lookup, seconds: float) -> bool:
        """Register a pin; return False if another pin has its number.

        If the server dies before that, nobody knows the number, and the pin expires by itself.
        """
        names = dict[str, list[str]]()
        for number, chunk in enumerate(in_order(request)):
            names.setdefault(chunk.request.scopes[0].scope, []).append(f"{pin}.{number}")
        lasts = max(1, round(seconds * 1000))
        return bool(
            await self._catalog.connection.command(
                "SET", pin_key(pin), packed(names), b"NX", b"PX", lasts
            )
        )

    async def release(self, pins: Sequence[int], caller: Caller = ANYBODY) -> None:
        """End pins before their time. Ignore unknown ones and those on another tenant's scopes."""
        drawn = [pin for pin in dict.fromkeys(pins) if pin < EXACT]
        if not caller.sees_all:
            drawn = await self._permitted(drawn, caller)
        for some in batched(drawn, _AT_ONCE):
            # One command for each: in a cluster they are on any node. GETDEL, so that of two
            # releases at once only one goes through the scopes.
            records = await self._catalog.connection.commands(
                [("GETDEL", pin_key(pin)) for pin in some]
            )
            scopes = dict[str, list[str]]()
            for record in filter(None, records):
                for scope, names in unpacked(record).items():
                    scopes.setdefault(scope, []).extend(names)
            await self._end(scopes)

    async def _permitted(self, pins: list[int], caller: Caller) -> list[int]:
        permitted = list[int]()
        for some in batched(pins, _AT_ONCE):
            records = await self._catalog.connection.commands(
                [("GET", pin_key(pin)) for pin in some]
            )
            scopes = [list[str](unpacked(record)) if record else [] for record in records]
            await self._catalog.learn(name for names in scopes for name in names)
            known = self._catalog.known
            permitted += [
                pin
                for pin, names in zip(some, scopes, strict=True)
                if all(name in known and may_use(caller, known[name].tenant) for name in names)
            ]
        return permitted

    async def _end(self, scopes: dict[str, list[str]]) -> None:
        for scope, names in scopes.items():
            for some in batched(names, _AT_ONCE):
                try:
                    await self._catalog.run([ScriptTask("unpin", scope, "pins", some)])
                except RequestError:
                    # The scope was removed or lost, and its pins with it.
                    break
