"""The injector `network`: a TCP proxy in front of each server, in a process of their own.

A driver whose library holds the interpreter's lock while it waits for its server would wait for
ever for proxies in the same process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING, ClassVar, Final

from hicache_conformance.harness.ports import free_ports
from hicache_conformance.injectors.injector import (
    MAX_HANG_SECONDS,
    ActiveFaults,
    ProcessInjector,
    find_fault,
    flipped,
)
from hicache_conformance.model.fault_plan import FaultKind, FaultPlan

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection


CHUNK_BYTES: Final = 1 << 16
SILENT_SECONDS: Final = 2.0
"""A server that has not answered a request for as long may never do so."""
_RESET: Final = struct.pack("ii", 1, 0)
"""Linger for no time: closing sends a reset."""


class TcpProxyInjector(ProcessInjector):
    """Proxies that pass bytes on, or delay, hold back, corrupt, cut or refuse them.

    The sorts of operations are `request` and `reply`. Each is a turn: all that one side sends
    before the other one answers. A reply that is lost whole, and its connection with it, is a
    request that took effect and failed (`FaultKind.APPLIED`).
    """

    name: ClassVar[str] = "network"

    def __init__(self, servers: Mapping[str, int]) -> None:
        super().__init__(_serve, dict(servers))
        try:
            self._ports: Mapping[str, int] = self.ask("ports")
        except BaseException:
            self.close()
            raise

    @property
    def ports(self) -> Mapping[str, int]:
        return self._ports

    def requests(self) -> int:
        """Count the turns of requests so far."""
        return int(self.ask("count_requests"))

    def hold_replies(self, quiet_seconds: float) -> None:
        """Hold replies back until nothing was sent for this time, so that waits can be counted."""
        self.ask("hold_replies", quiet_seconds)

    def waits(self) -> int:
        """Let replies through again, and count how often the driver has waited for some."""
        return int(self.ask("waits"))


def _serve(pipe: Connection, servers: Mapping[str, int]) -> None:
    asyncio.run(_Proxies(servers).obey(pipe))


class _Proxies:
    """All proxies, and the injector's calls, in one loop."""

    def __init__(self, servers: Mapping[str, int]) -> None:
        self._active = ActiveFaults()
        self._healed = asyncio.Event()
        self._seen = 0
        self.counter: _WaitCounter | None = None
        """Counts waits, while replies are held."""
        self._proxies = {name: _Proxy(self, port) for name, port in servers.items()}

    async def obey(self, pipe: Connection) -> None:
        """Listen, and execute calls until the other side has gone."""
        await self.heal()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(EOFError, OSError):
            while True:
                name, arguments = await loop.run_in_executor(None, pipe.recv)
                pipe.send(await getattr(self, name)(*arguments))

    async def ports(self) -> dict[str, int]:
        """The ports of the proxies."""
        return {name: proxy.port for name, proxy in self._proxies.items()}

    async def apply(self, plan: FaultPlan) -> None:
        """Activate a plan."""
        self._active = ActiveFaults(plan.faults)
        self._healed = asyncio.Event()
        if find_fault(plan.faults, FaultKind.REFUSE):
            self._active.injected_count += 1
            for proxy in self._proxies.values():
                proxy.refuse()

    async def heal(self) -> None:
        """End all faults, and release what hangs."""
        self._active.heal()
        self._healed.set()
        for proxy in self._proxies.values():
            await proxy.listen()

    async def count_requests(self) -> int:
        """Count the turns of requests so far."""
        return self._seen

    async def count_injected(self) -> int:
        """Count the turns that a fault of the present plan has hit."""
        return self._active.injected_count

    async def hold_replies(self, quiet_seconds: float) -> None:
        """Hold replies back until nothing was sent for this time."""
        self.counter = _WaitCounter(quiet_seconds)

    async def waits(self) -> int:
        """Let replies through again; how often the client has waited."""
        counter, self.counter = self.counter, None
        return 0 if counter is None else counter.close()

    async def through(self, operation: str, content: bytes, *, begins: bool) -> bytes:
        """Pass bytes on, as the active faults let them.

        Args:
            begins: they are the first of a turn.

        Raises:
            ConnectionResetError: the connection is cut; its argument is what still goes through.
            _HalfOpen: neither these bytes nor later ones go through.
        """
        # A turn is one round trip, in however many packets it comes (EX-10).
        self._seen += begins and operation == "request"
        # Read once: `apply` may replace both while this turn is delayed.
        active, healed = self._active, self._healed
        faults = active.at(operation) if begins else []
        for fault in faults:
            seconds = {FaultKind.DELAY: fault.seconds, FaultKind.HANG: MAX_HANG_SECONDS}.get(
                fault.kind
            )
            if seconds is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(healed.wait(), seconds)
        if find_fault(faults, FaultKind.APPLIED):
            raise ConnectionResetError(b"")
        if find_fault(faults, FaultKind.CUT):
            raise ConnectionResetError(content[: len(content) // 2])
        if find_fault(faults, FaultKind.HALF_OPEN):
            raise _HalfOpen
        flip = find_fault(faults, FaultKind.BIT_FLIP)
        return flipped(content, flip.place) if flip else content


class _Proxy:
    """One port in front of one server."""

    def __init__(self, injector: _Proxies, server: int) -> None:
        self._injector = injector
        self._server = server
        self._listener: asyncio.Server | None = None
        self._writers = set[asyncio.StreamWriter]()
        # Of nobody else, also while connections are refused: the driver has it in its options.
        [self.port] = free_ports(1)

    async def listen(self) -> None:
        """Accept connections; at once if it does already."""
        if self._listener is None:
            self._listener = await asyncio.start_server(
                self._accept, "127.0.0.1", self.port, reuse_address=True
            )

    def refuse(self) -> None:
        """Stop listening, and reset all connections."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for writer in list(self._writers):
            _reset(writer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        turn = _Turn()
        counter = self._injector.counter
        if counter is not None:
            counter.expect(turn)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._server)
        except OSError:
            _reset(writer)
            return
        finally:
            if counter is not None:
                counter.forget(turn)
        self._writers |= {writer, back}
        try:
            await asyncio.gather(
                self._pump("request", reader, back, turn), self._pump("reply", there, writer, turn)
            )
        except OSError:
            pass
        finally:
            self._writers -= {writer, back}
            if self._injector.counter is not None:
                self._injector.counter.forget(turn)
            for end in (writer, back):
                # A cut connection is reset. An orderly end could be taken for a short reply that is
                # complete.
                _reset(end) if turn.cut else end.close()

    async def _pump(
        self,
        operation: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        turn: _Turn,
    ) -> None:
        while content := await reader.read(CHUNK_BYTES):
            begins = turn.of != operation
            turn.of = operation
            counter = self._injector.counter
            if counter is not None:
                await counter.passing(operation, turn)
            try:
                content = await self._injector.through(operation, content, begins=begins)
            except _HalfOpen:
                # Until the client closes it, or `refuse` resets it.
                while await reader.read(CHUNK_BYTES):
                    pass
                turn.cut = True
                raise ConnectionResetError from None
            except ConnectionResetError as cut:
                turn.cut = True
                writer.write(cut.args[0])
                raise
            writer.write(content)
            await writer.drain()
        # One side has ended: the other one learns of it, and may still say something.
        if writer.can_write_eof():
            writer.write_eof()


class _HalfOpen(Exception):
    """The connection carries nothing more."""


class _Turn:
    """Direction of a connection's current transfer."""

    def __init__(self) -> None:
        self.of = ""
        self.cut = False


class _WaitCounter:
    """Counts how often a client waits: holds all replies until it has nothing more to send.

    A client that sends 384 commands in several packets while answers arrive waits once, and so does
    one that sends them on 384 connections. One that sends 16 and needs their answers before it
    sends 16 more waits 24 times, whatever the server's pace.

    Args:
        quiet_seconds: time without a byte after which the client waits.
    """

    def __init__(self, quiet_seconds: float) -> None:
        self._quiet = quiet_seconds
        self._waits = 0
        self._asked = False
        """The client has sent something since replies were last let through."""
        self._unanswered = set[_Turn]()
        self._held = 0
        self._last = 0.0
        self._open = asyncio.Event()
        self._task = asyncio.create_task(self._release())

    async def passing(self, operation: str, turn: _Turn) -> None:
        """Note bytes that pass, and hold them if they are a reply."""
        self._last = asyncio.get_running_loop().time()
        if operation == "request":
            self._asked = True
            self.expect(turn)
            return
        self._unanswered.discard(turn)
        self._held += 1
        await self._open.wait()

    def expect(self, turn: _Turn) -> None:
        """Let no reply through before this connection has one, or has been made."""
        self._last = asyncio.get_running_loop().time()
        self._unanswered.add(turn)

    def forget(self, turn: _Turn) -> None:
        """Expect no reply on a connection: it is closed, or has just been made."""
        self._last = asyncio.get_running_loop().time()
        self._unanswered.discard(turn)

    def close(self) -> int:
        """Let everything through; the waits until now."""
        self._task.cancel()
        self._open.set()
        return self._waits

    async def _release(self) -> None:
        """Let the replies through whenever the client waits for them."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._quiet / 4)
            still = clock() - self._last
            # A slow server makes the client's wait longer, and is no reason to count two.
            if self._held and still >= (SILENT_SECONDS if self._unanswered else self._quiet):
                self._waits += self._asked
                self._asked = False
                self._held = 0
                self._open.set()
                self._open = asyncio.Event()


def _reset(writer: asyncio.StreamWriter) -> None:
    bare: socket.socket | None = writer.get_extra_info("socket")
    if bare is not None:
        with contextlib.suppress(OSError):
            bare.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
