"""First answers, kept for those who ask again."""

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
    """Tells requests apart."""
    return xxhash.xxh3_128_digest(b"%b %b %b" % (path.encode(), content_type.encode(), body))


def check_idempotency_key(once: str) -> None:
    """See that a client's idempotency key is not too long.

    Raises:
        RequestError: it is.
    """
    if len(once) > KEY_CHARACTERS:
        raise invalid(
            f"an idempotency key of more than {KEY_CHARACTERS} characters", IDEMPOTENCY_HEADER
        )


class IdempotencyCache:
    """Answers by idempotency key, until they are forgotten."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._kept: dict[str, AnswerRecord] = {}
        self._ends: deque[tuple[float, str]] = deque()
        self.added: list[AnswerRecord] = []
        """Not written down yet."""

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, once: str, digest: bytes, now: float) -> AnswerRecord | None:
        """The answer that this request has had.

        Raises:
            RequestError: the key belongs to another request.
        """
        record = self._kept.get(once)
        if record is None or record.until <= now:
            return None
        if record.digest != digest:
            raise key_reused()
        return record

    def add(self, record: AnswerRecord) -> None:
        """Keep the answer to a request that was done just now."""
        self._keep(record)
        self.added.append(record)

    def restore(self, records: Iterable[AnswerRecord]) -> None:
        """Take over what was written down."""
        for record in sorted(records, key=lambda record: record.until):
            self._keep(record)

    def expire(self, now: float) -> None:
        """Drop what nobody may ask for any more."""
        while self._ends and self._ends[0][0] <= now:
            _, once = self._ends.popleft()
            record = self._kept.get(once)
            if record is not None and record.until <= now:
                del self._kept[once]

    def withdraw(self, records: Iterable[AnswerRecord]) -> None:
        """Forget answers that could not be written down: nobody was told them."""
        for record in records:
            if self._kept.get(record.once) is record:
                del self._kept[record.once]

    def _keep(self, record: AnswerRecord) -> None:
        self._kept[record.once] = record
        self._ends.append((record.until, record.once))
