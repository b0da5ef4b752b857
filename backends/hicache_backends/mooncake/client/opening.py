"""How a client of the library is set up, so that it neither hangs nor pays for its connections in the middle of calls."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final

from hicache_backends.mooncake.client import library
from hicache_storage.spec import StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_backends.mooncake.client.library import Store
    from hicache_backends.mooncake.config import ClientSettings

WARM_THREADS: Final = 6
WARM_REQUESTS: Final = 10
WARM_NAMES: Final = [f"hicache-warm-up-{number}" for number in range(64)]
WAIT_SECONDS: Final = 2.0


def set_up(settings: ClientSettings) -> Store:
    """A client that is connected, to a master that answers: the interpreter's lock is held meanwhile.

    Raises:
        DriverUnavailableError: the library is missing or too old.
        StorageUnavailableError: the library refuses.
    """
    store = library.new_store()
    milliseconds = str(max(1, int(settings.rpc_timeout_seconds * 1000)))
    variables = {
        "MC_RPC_TIMEOUT_MS": milliseconds,
        "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
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
            f"Mooncake's client cannot be set up (code {code}) with the master {settings.master_server_address!r}, metadata_server "
            f"{settings.metadata_server!r}, local_hostname {settings.local_hostname!r} and protocol {settings.protocol!r}"
        )
    return store


def warm_up(ask: Callable[[list[str]], object]) -> None:
    """Let the library open its connections to the master now, and not one by one as calls happen to overlap.

    Args:
        ask: a request to the master; raises StorageUnavailableError where that does not answer.
    """
    together = threading.Barrier(WARM_THREADS)

    def ask_often() -> None:
        with contextlib.suppress(threading.BrokenBarrierError, StorageUnavailableError):
            together.wait(WAIT_SECONDS)
            for _ in range(WARM_REQUESTS):
                ask(WARM_NAMES)

    threads = [threading.Thread(target=ask_often, name="hicache-mooncake-warm-up", daemon=True) for _ in range(WARM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
