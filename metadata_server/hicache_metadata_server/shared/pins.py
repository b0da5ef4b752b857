"""PinRegistry, which have one number for slots of several scopes."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.core.chunking import groups_of
from hicache_metadata_server.core.errors import RefusedError
from hicache_metadata_server.core.tenants import ANYBODY, Caller, may_use
from hicache_metadata_server.shared.catalog import ScriptTask
from hicache_metadata_server.shared.chunking import in_order
from hicache_metadata_server.shared.names import pin_key
from hicache_metadata_server.shared.script_results import EXACT, packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_metadata_server import protocol as p
    from hicache_metadata_server.shared.catalog import ScopeCatalog

_AT_ONCE: Final = 64


class PinRegistry:
    """Which scopes each pin is on. The slots, and when it ends, each scope knows itself."""

    def __init__(self, catalog: ScopeCatalog) -> None:
        self._catalog = catalog

    def draw(self) -> int:
        """A number that hardly anybody has."""
        return 1 + secrets.randbelow(EXACT - 1)

    async def enter(self, pin: int, request: p.Lookup, seconds: float) -> bool:
        """Write down what a pin is on; False if another pin has that number. One that its server
        dies with is told to nobody, and ends by itself."""
        names = dict[str, list[str]]()
        for number, piece in enumerate(in_order(request)):
            names.setdefault(piece.request.scopes[0].scope, []).append(f"{pin}.{number}")
        lasts = max(1, round(seconds * 1000))
        return bool(
            await self._catalog.connection.command(
                "SET", pin_key(pin), packed(names), b"NX", b"PX", lasts
            )
        )

    async def let_go(self, pins: Sequence[int], caller: Caller = ANYBODY) -> None:
        """End pins before their time; unknown ones, and those on another tenant's scopes, are no
        error."""
        drawn = [pin for pin in dict.fromkeys(pins) if pin < EXACT]
        if not caller.sees_all:
            drawn = await self._permitted(drawn, caller)
        for some in groups_of(drawn, _AT_ONCE):
            # One by one: in a cluster they lie anywhere.
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
        for some in groups_of(pins, _AT_ONCE):
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
            for some in groups_of(names, _AT_ONCE):
                try:
                    await self._catalog.run([ScriptTask("unpin", scope, "pins", some)])
                except RefusedError:
                    # The scope was lost, and its pins with it.
                    break
