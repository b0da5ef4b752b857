"""Probe of a master without the library.

The library holds the GIL while it connects, so a master that accepts connections and does not
answer would stop the whole process. The probe takes a socket and has a timeout.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

from hicache_storage.spec import StorageTimeoutError, StorageUnavailableError

_UNKNOWN_FUNCTION: Final = 0x48694361
# coro_rpc: magic, version, serialisation, message type, sequence, function, body and handle length, little endian.
_REQUEST: Final = struct.pack("<BBBBIIII", 21, 1, 0, 0, 0, _UNKNOWN_FUNCTION, 0, 0)


def check_master(address: tuple[str, int], seconds: float) -> None:
    """Call a function that no master has. A refusal or a closed connection proves a live master.

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
