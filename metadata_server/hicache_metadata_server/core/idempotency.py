"""Idempotency keys: repeated requests get the first answer."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import xxhash

from hicache_metadata_server.core.errors import invalid, key_reused
from hicache_metadata_server.protocol import IDEMPOTENCY_HEADER

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_metadata_server.core.changes import AnswerRecord

KEY_CHARACTERS: Final = 128


def digest_of(path: str, content_type: str, body: bytes) -> bytes:
    """Digest of a request, by which requests of one key are compared."""
    return xxhash.xxh3_128_digest(b"%b %b %b" % (path.encode(), content_type.encode(), body))


def check_idempotency_key(idempotency_key: str) -> None:
    """Check the length of a client's idempotency key.

    Raises:
        RequestError: it is too long.
    """
    if len(idempotency_key) > KEY_CHARACTERS:
        raise invalid(
            f"an idempotency key of more than {KEY_CHARACTERS} characters", IDEMPOTENCY_HEADER
        )


class IdempotencyCache:
    """Answers by idempotency key, each kept for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._kept: dict[str, AnswerRecord] = {}
        self._ends: deque[tuple[float, str]] = deque()
        self.added: list[AnswerRecord] = []
        """Answers that are not durable yet."""

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, idempotency_key: str, digest: bytes, now: float) -> AnswerRecord | None:
        """Find the answer that this request got before.

        Raises:
            RequestError: the key belongs to another request.
        """
        record = self._kept.get(idempotency_key)
        if record is None or record.until <= now:
            return None
        if record.digest != digest:
            raise key_reused()
        return record

    def add(self, record: AnswerRecord) -> None:
        """Keep the answer to a request that has just been done."""
        self._keep(record)
        self.added.append(record)

    def restore(self, records: Iterable[AnswerRecord]) -> None:
        """Add durable answers at the start."""
        for record in sorted(records, key=lambda record: record.until):
            self._keep(record)

    def expire(self, now: float) -> None:
        """Drop answers whose time has ended."""
        while self._ends and self._ends[0][0] <= now:
            _, idempotency_key = self._ends.popleft()
            record = self._kept.get(idempotency_key)
            # After a withdrawal the key may have a later answer, with an entry of its own.
            if record is not None and record.until <= now:
                del self._kept[idempotency_key]

    def withdraw(self, records: Iterable[AnswerRecord]) -> None:
        """Remove answers that could not be made durable.

        Their requests were answered with an error, and a repetition must be done again.
        """
        for record in records:
            if self._kept.get(record.idempotency_key) is record:
                del self._kept[record.idempotency_key]

    def release(self, scope: str) -> None:
        """Drop the answers of a scope that another server will own."""
        self._kept = {key: one for key, one in self._kept.items() if one.scope != scope}
        self.added = [one for one in self.added if one.scope != scope]

    def _keep(self, record: AnswerRecord) -> None:
        self._kept[record.idempotency_key] = record
        # Ordered by time without a heap: every answer is kept equally long.
        self._ends.append((record.until, record.idempotency_key))
