"""The error tree.

```
HiCacheError
+-- DriverError                      before any page moves
|   +-- DriverNotFoundError          no driver of that name (LookupError)
|   +-- DriverUnavailableError       the driver's own dependencies cannot be imported (ImportError)
|   +-- DriverContractError          the driver is not what its spec says (TypeError)
|   +-- ConfigError                  an option is unknown or has a bad value (ValueError)
+-- UnsupportedOperationError        the capability is not declared
+-- InvalidIdentityError             a field of the identity contradicts another (ValueError)
+-- InvalidPoolError                 a host pool that cannot be served (ValueError)
+-- InvalidTransferError             wrong keys or indices in a call (ValueError)
|   +-- UnknownPoolError             a get or set names a pool that was never registered
+-- SlotError                        slots of a host pool asked for or given back wrongly (ValueError)
+-- MayHangError                     a call that was to be answered from memory takes more
+-- StorageClosedError               used after close() (RuntimeError)
+-- StorageForkedError               opened before a fork, used in the child (RuntimeError)
+-- StorageUnavailableError          the outside world failed: raised inside drivers, by open() and clear(), never by the data path
    +-- StorageRefusedError          it works, and refuses: full, a quota, a limit of requests
    +-- StorageTimeoutError          it did not answer in time (TimeoutError)
```

Absent pages, pages that did not fit, and pages that turned out damaged are values (`False`), not
errors.
"""

from __future__ import annotations

import errno
from typing import Final


class HiCacheError(Exception):
    """Base of what storages raise, and what finds and makes them."""


class DriverError(HiCacheError):
    """A driver could not be found, loaded or configured."""


class DriverNotFoundError(DriverError, LookupError):
    """No installed plugin registers a driver of this name."""


class DriverUnavailableError(DriverError, ImportError):
    """A driver's module or one of its dependencies cannot be imported.

    `__cause__` has the reason.
    """


class DriverContractError(DriverError, TypeError):
    """A driver does not offer what its spec or the contract promises."""


class ConfigError(DriverError, ValueError):
    """An option is unknown or has an unusable value; the message names it and the fix."""


class UnsupportedOperationError(HiCacheError):
    """An optional operation was called that the driver does not declare."""


class InvalidIdentityError(HiCacheError, ValueError):
    """A field of a `StorageIdentity` is out of range or contradicts another."""


class InvalidPoolError(HiCacheError, ValueError):
    """A host pool cannot be served; raised at registration, before any transfer."""


class InvalidTransferError(HiCacheError, ValueError):
    """The arguments of a call contradict each other; a bug of the caller."""


class UnknownPoolError(InvalidTransferError):
    """A get or set names a pool that was never registered."""


class SlotError(HiCacheError, ValueError):
    """Slots of a host pool were asked for or given back wrongly, for instance twice.

    The message names them.
    """


class MayHangError(HiCacheError):
    """A call with `from_memory` cannot be answered without I/O."""


class StorageClosedError(HiCacheError, RuntimeError):
    """The storage was closed by its owner."""


class StorageForkedError(HiCacheError, RuntimeError):
    """The storage was opened before a fork and is used in the child; open a new one there."""


class StorageUnavailableError(HiCacheError):
    """The outside world failed: I/O error, server down, malformed answer.

    Drivers raise it freely. The data path of the SDK turns it into misses; only `open()` and
    `clear()` let it through.
    """


class StorageRefusedError(StorageUnavailableError):
    """The store works and refuses this caller: it is full, a quota is used up, requests come too fast.

    A driver raises it instead of a plain `StorageUnavailableError`: the pages are missed or refused
    all the same, but it is no fault, and opens no circuit breaker.
    """


class StorageTimeoutError(StorageUnavailableError, TimeoutError):
    """The outside world did not answer before the deadline."""


_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})


def is_refusal(error: BaseException, *, reads: bool = False) -> bool:
    """Return True if a store has answered with this error, and refuses: no fault of it.

    A store that is full, over its quota, read-only or not writable works: what is there can be
    read.

    Args:
        error: of the store.
        reads: the call was to read, for which denied permission is a fault.
    """
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM or (not reads and error.errno in _DENIED)
    return isinstance(error, StorageRefusedError)
