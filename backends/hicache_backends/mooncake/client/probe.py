"""Asks whether a master answers, without the library.

The library holds the interpreter's lock while it connects, so that a master that accepts connections and says nothing would
stop the whole process. Here it costs a socket and the time that the caller gives.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

from hicache_storage.spec import StorageTimeoutError, StorageUnavailableError

_NOBODY_S_FUNCTION: Final = 0x48694361
# coro_rpc: magic, version, serialisation, message type, sequence, function, body and attachment length, little endian.
_REQUEST: Final = struct.pack("<BBBBIIII", 21, 1, 0, 0, 0, _NOBODY_S_FUNCTION, 0, 0)


def check_master(address: tuple[str, int], seconds: float) -> None:
    """Call a function that no master has. Whoever refuses it, or hangs up, is awake; whoever is silent hangs.

    Raises:
        StorageTimeoutError: nothing is said in time.
        StorageUnavailableError: nobody listens.
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
