"""HTTP/1.1 as uvicorn speaks it, but an answer's head and body leave in one piece: half the system calls, and one wake-up of the client."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class OneWriteProtocol(HttpToolsProtocol):
    """Of one connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        """Put the joining in between."""
        super().connection_made(cast("asyncio.Transport", _Joined(transport)))


class _Joined:
    """A transport that sends at the end of the event loop's turn what was written in it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send it soon, with what follows at once."""
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)

    def close(self) -> None:
        """Send what is left, and close."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        parts, self._parts = self._parts, []
        # The client may have gone away in the same turn.
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))
