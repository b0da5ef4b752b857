"""Arguments of drivers: batches of lookups, reads and writes, one batch for each namespace."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hicache_storage.objects.namespace import (
    ENVELOPE_BYTES,
    Namespace,
    belongs,
    checksum,
    key_digest,
    mismatch,
    seal,
    stored_checksum,
)
from hicache_storage.observability.request_ids import call_request_id
from hicache_storage.spec import StorageTimeoutError
from hicache_storage.spec.arguments import MAX_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from hicache_storage.spec import CancellationToken, MissReason


MIN_TIMEOUT_SECONDS: Final = 0.001
"""Of an operation that begins when the deadline of its call is about to pass."""
_ALWAYS_ACTIVE: Final[AbstractContextManager[bool]] = nullcontext(True)
"""The shield of a call without a cancellation token."""


class Call:
    """Context of one call: deadline, cancellation, prefix keys and request id."""

    __slots__ = (
        "_cancellation",
        "_deadline",
        "_given_id",
        "_request_id",
        "faults_before",
        "miss_reason",
        "prefix_keys",
    )

    def __init__(
        self,
        seconds: float | None = None,
        *,
        prefix_keys: Sequence[str] = (),
        request_id: str | None = None,
        cancellation: CancellationToken | None = None,
    ) -> None:
        # Longer than any lock of Python can wait: as good as no deadline.
        self._deadline = (
            None if seconds is None or seconds > MAX_SECONDS else time.monotonic() + seconds
        )
        self._cancellation = cancellation
        self.prefix_keys = prefix_keys
        """Keys that precede the call's keys in the chain."""
        self._given_id = request_id
        self._request_id = ""
        self.faults_before = 0
        """Faults of the storage when the call began."""
        self.miss_reason: MissReason | None = None
        """Reason that the driver was not asked, or has not answered."""

    @property
    def request_id(self) -> str:
        """For logs, and for servers: the engine's, or one that is drawn at the first use."""
        if not self._request_id:
            self._request_id = call_request_id(self._given_id)
        return self._request_id

    def remaining(self) -> float | None:
        """Seconds until the deadline, at least 0; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def timeout(self, most: float) -> float:
        """Return the seconds that one operation of the store may take: `most`, or what is left.

        For `socket.settimeout()` and the like: a call that has no timeout of its own keeps its
        thread when its server is gone (rule FT-4).

        Raises:
            StorageTimeoutError: the deadline has passed, or the call is cancelled. Sockets would
                take 0 for not waiting at all.
        """
        left = self.remaining()
        if self.expired():
            raise StorageTimeoutError("the call is over")
        return most if left is None else max(MIN_TIMEOUT_SECONDS, min(most, left))

    def lru_order(self, keys: Sequence[str]) -> list[str]:
        """Return pages of this call in the order in which a store that evicts counts their use.

        The tail of the chain first and its head last, `prefix_keys` included: scored in this order,
        tails are evicted before heads (rule EV-3).
        """
        return [*reversed(keys), *reversed(self.prefix_keys)]

    def shield(self) -> AbstractContextManager[bool]:
        """Make a cancellation wait for a block that writes to a destination.

        `with call.shield() as active:` writes only `if active`; otherwise the call is cancelled,
        and the memory is the caller's again. Nothing that may hang belongs into the block (rule
        GET-9).
        """
        return _ALWAYS_ACTIVE if self._cancellation is None else self._cancellation.shield()

    @property
    def cancelled(self) -> bool:
        """True once the caller has been answered without this call."""
        return self._cancellation is not None and self._cancellation.cancelled

    def expired(self) -> bool:
        """Return True once the deadline has passed or the call is cancelled.

        A driver asks this after it has read the last byte of a page and before it publishes it, and
        publishes nothing once it is true: the caller may have been answered already and may have
        reused the memory (rule SET-8).
        """
        if self.cancelled:
            return True
        return self._deadline is not None and time.monotonic() >= self._deadline


class ObjectRead:
    """One page to be read into buffers.

    A driver fills `buffers` and `envelope`, from an object of exactly their length, and reports
    `True`; the SDK then verifies. A driver that reads in several threads may call `verify()` there
    itself, while the bytes are in the cache.
    """

    __slots__ = (
        "_buffers",
        "_call",
        "_found_bytes",
        "_verdict",
        "damaged",
        "envelope",
        "key",
        "namespace",
        "verifies_checksum",
    )

    def __init__(
        self,
        namespace: Namespace,
        key: str,
        buffers: list[memoryview] | Callable[[], list[memoryview]],
        *,
        verifies_checksum: bool = True,
        call: Call | None = None,
    ) -> None:
        self.namespace = namespace
        self.key = key
        self._buffers = buffers
        self.envelope: bytes | bytearray = bytearray(ENVELOPE_BYTES)
        """To be filled or replaced with the 64 bytes that were stored with the page."""
        self.damaged = False
        """True if the stored bytes are not the page.

        Set by `verify()`, or by a driver that detects it itself.
        """
        self.verifies_checksum = verifies_checksum
        """True if `verify()` compares checksums; otherwise none needs to be computed."""
        self._call = call
        self._verdict: bool | None = None
        self._found_bytes: int | None = None

    @classmethod
    def aside(cls, namespace: Namespace, key: str, *, verifies_checksum: bool = True) -> Self:
        """Make a read into a buffer of its own.

        It verifies a stored page again without a caller's memory.
        """
        buffers = [memoryview(bytearray(length)) for length in namespace.geometry.component_bytes]
        return cls(namespace, key, buffers, verifies_checksum=verifies_checksum)

    @property
    def buffers(self) -> list[memoryview]:
        """The page's components, writable, of the lengths in `namespace.geometry.component_bytes`.

        They may be created on first access, which a driver makes in one thread, once it knows where
        the page is.
        """
        if callable(self._buffers):
            self._buffers = self._buffers()
        return self._buffers

    @property
    def parts(self) -> list[memoryview]:
        """Everything to be filled, in order: the components, then the envelope."""
        return [*self.buffers, memoryview(self.envelope)]

    def fill(self, payload: bytes | bytearray | memoryview | None) -> bool:
        """Copy a whole stored object, components and envelope, into place.

        Returns:
            `False` if there is no object, it is torn, or the call is cancelled.
        """
        if payload is None:
            return False
        if len(payload) != self.namespace.object_bytes:
            self.damaged = True
            self._found_bytes = len(payload)
            return False
        # A get that missed its deadline has returned, and its pages may belong to another request.
        with _ALWAYS_ACTIVE if self._call is None else self._call.shield() as active:
            return active and self._copy(memoryview(payload))

    def has_read(self, payload: bytes | bytearray | memoryview) -> bool:
        """Return True if a stored object is the damaged one of this read, or another damaged one.

        False for one that has been stored in its place since. An object of another length is
        damaged, whoever has stored it.
        """
        return len(payload) != self.namespace.object_bytes or payload == b"".join(self.parts)

    def _copy(self, payload: memoryview) -> bool:
        start = 0
        for part in self.parts:
            part[:] = payload[start : start + len(part)]
            start += len(part)
        return True

    def verify(self, computed: int | None = None) -> bool:
        """Check length, identity, key and checksum of the read page (rule GET-5).

        Returns True if they fit.

        Args:
            computed: the checksum of the buffers, where the driver has computed it piece by piece
                while reading.
        """
        # A driver may have verified in its own thread, while the bytes were in the CPU's cache; the
        # SDK then asks again and must not read the page a second time.
        if self._verdict is None:
            fits = belongs(self.envelope, self.namespace.envelope_prefix, key_digest(self.key))
            if fits and self.verifies_checksum:
                fits = (
                    checksum(self.buffers) if computed is None else computed
                ) == stored_checksum(self.envelope)
            self._verdict = fits
            self.damaged = not fits
        return self._verdict

    def defect(self) -> str:
        """Describe why a page is damaged, for logs; empty if it is not known to be."""
        if not self.damaged:
            return ""
        # A driver that finds an object of another length has not filled the envelope.
        if self._verdict is None:
            return self._wrong_length()
        wrong = mismatch(self.envelope, self.namespace.envelope_prefix, key_digest(self.key))
        return wrong or "whose checksum does not fit its bytes"

    def _wrong_length(self) -> str:
        if self._found_bytes is None:
            return "whose object has another length or is torn"
        # What follows the colon differs from pool to pool.
        lengths = f"{self._found_bytes} bytes, not {self.namespace.object_bytes}"
        if self._found_bytes == self.namespace.page_bytes:
            return f"whose object has no envelope: {lengths}"
        return f"whose object has another length: {lengths}"

    def retract(self) -> None:
        """Forget the verdict, before the parts are filled again from a newer copy of the object."""
        self._verdict = None
        self._found_bytes = None
        self.damaged = False


class ObjectWrite:
    """One page to be written from buffers."""

    __slots__ = ("_envelope", "buffers", "existed", "key", "namespace", "replaces")

    def __init__(
        self, namespace: Namespace, key: str, buffers: list[memoryview], *, replaces: bool = False
    ) -> None:
        self.namespace = namespace
        self.key = key
        self.buffers = buffers
        """The page's components."""
        self.replaces = replaces
        """True if an object of this key may exist and is damaged: this one replaces it."""
        self.existed = False
        """True if the whole object existed and nothing was written.

        Set by drivers that detect it themselves.
        """
        # Not computed here: a driver that finds the object existing never reads the page.
        self._envelope: bytes | None = None

    @property
    def envelope(self) -> bytes:
        """The 64 bytes to keep with the page.

        Computed when first asked for, which reads the whole page once.
        """
        if self._envelope is None:
            self._envelope = seal(self.namespace.envelope_prefix, self.key, checksum(self.buffers))
        return self._envelope

    def seal(self, computed: int) -> None:
        """Make the envelope of a checksum that the driver has computed while writing."""
        self._envelope = seal(self.namespace.envelope_prefix, self.key, computed)

    @property
    def parts(self) -> list[memoryview]:
        """Everything to be stored, in order: the components, then the envelope."""
        return [*self.buffers, memoryview(self.envelope)]

    def tobytes(self) -> bytes:
        """The whole object as one copy."""
        return b"".join(self.parts)


@dataclass(frozen=True, slots=True)
class LookupBatch:
    """Keys of one namespace to be looked up (or deleted)."""

    namespace: Namespace
    keys: Sequence[str]

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Pages of one namespace to be read."""

    namespace: Namespace
    reads: Sequence[ObjectRead]

    def __len__(self) -> int:
        return len(self.reads)


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """Pages of one namespace to be written, in the order of their chain."""

    namespace: Namespace
    writes: Sequence[ObjectWrite]

    def __len__(self) -> int:
        return len(self.writes)
