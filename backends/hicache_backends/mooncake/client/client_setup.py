"""Set-up of the library's client, with bounded waits and connections opened in advance."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from typing import TYPE_CHECKING, Final

from hicache_backends.mooncake.client import library
from hicache_storage.spec import StorageTimeoutError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_backends.mooncake.client.library import Store
    from hicache_backends.mooncake.config import ClientSettings

WARM_THREADS: Final = 6
WARM_REQUESTS: Final = 10
WARM_NAMES: Final = [f"hicache-warm-up-{number}" for number in range(64)]
WAIT_SECONDS: Final = 2.0
PROBE_SECONDS: Final = 2.0
"""Timeout of a probe of the master, and of a connection to it."""
CONNECT_ATTEMPTS: Final = 4
CONNECT_PAUSE: Final = 1.0
"""Seconds after each of the library's attempts to reconnect to the master."""
_UNKNOWN_FUNCTION: Final = 0x48694361
# coro_rpc: magic, version, serialisation, message type, sequence, function, body and attachment
# length, little endian.
_REQUEST: Final = struct.pack("<BBBBIIII", 21, 1, 0, 0, 0, _UNKNOWN_FUNCTION, 0, 0)


def check_master(address: tuple[str, int], seconds: float) -> None:
    """Call a function that no master has. A refusal or a closed connection proves a live master.

    The library is not used: it holds the GIL while it connects, so a master that accepts
    connections and does not answer would stop the whole process.

    Raises:
        StorageTimeoutError: no answer in time.
        StorageUnavailableError: the connection is refused, or fails otherwise.
    """
    where = f"the master at {address[0]}:{address[1]}"
    try:
        with socket.create_connection(address, timeout=seconds) as connection:
            connection.sendall(_REQUEST)
            connection.recv(1)
    except TimeoutError as error:
        raise StorageTimeoutError(f"{where} has not answered for {seconds:.1f} s") from error
    except ConnectionResetError:
        return
    except OSError as error:
        raise StorageUnavailableError(f"{where} cannot be reached: {error}") from error


def set_up(settings: ClientSettings) -> Store:
    """Set up a client. The caller has probed the master, because this call holds the GIL.

    Raises:
        DriverUnavailableError: the library is missing or too old.
        StorageUnavailableError: the library refuses.
    """
    store = library.new_store()
    library.set_transfer_timeouts()
    variables = {
        **_time_limits(settings),
        # The master has answered the probe, and each further attempt would hold the GIL.
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    }
    with library.environment(variables):
        code = store.setup(
            settings.local_hostname,
            settings.metadata_server,
            settings.global_segment_size,
            settings.local_buffer_size,
            settings.protocol,
            settings.device_name,
            settings.master_server_address,
            tenant_id=settings.tenant_id,
        )
    if code:
        store.close()
        raise StorageUnavailableError(
            f"Mooncake's client cannot be set up (code {code}) with the master "
            f"{settings.master_server_address!r}, metadata_server "
            f"{settings.metadata_server!r}, local_hostname {settings.local_hostname!r} and "
            f"protocol {settings.protocol!r}"
        )
    return store


def max_lookup_seconds(settings: ClientSettings) -> float | None:
    """Upper bound of one lookup in seconds; None if the settings imply none.

    After a dead connection a request is sent twice, each time after a probe.
    """
    limits = {name: os.environ.get(name, limit) for name, limit in _time_limits(settings).items()}
    if settings.master is None or not all(limit.isdecimal() for limit in limits.values()):
        return None
    request, connect = (int(limit) / 1000 for limit in limits.values())
    return CONNECT_ATTEMPTS * (connect + CONNECT_PAUSE) + 2 * request + 2 * PROBE_SECONDS


def _time_limits(settings: ClientSettings) -> dict[str, str]:
    """The library's variables for the timeouts of requests and connections, in milliseconds."""
    request, connect = (
        settings.rpc_timeout_seconds,
        min(PROBE_SECONDS, settings.rpc_timeout_seconds),
    )
    names = ("MC_RPC_TIMEOUT_MS", "MC_RPC_CONNECT_TIMEOUT_MS")
    return {
        name: str(max(1, int(seconds * 1000)))
        for name, seconds in zip(names, (request, connect), strict=True)
    }


def warm_up(ask: Callable[[list[str]], object]) -> None:
    """Open the library's connections to the master now, not later when calls overlap.

    Args:
        ask: sends a request to the master; may raise StorageUnavailableError.
    """
    # Requests that overlap need a connection each.
    together = threading.Barrier(WARM_THREADS)

    def ask_often() -> None:
        with contextlib.suppress(threading.BrokenBarrierError, StorageUnavailableError):
            together.wait(WAIT_SECONDS)
            for _ in range(WARM_REQUESTS):
                ask(WARM_NAMES)

    threads = [
        threading.Thread(target=ask_often, name="hicache-mooncake-warm-up", daemon=True)
        for _ in range(WARM_THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
