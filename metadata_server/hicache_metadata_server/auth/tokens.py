"""Who may do what."""

from __future__ import annotations

import time
from hmac import compare_digest
from typing import TYPE_CHECKING, Final, NamedTuple

from hicache_metadata_server.auth.token_file import digest
from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.core.tenants import ANYBODY, Caller
from hicache_metadata_server.protocol import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hicache_metadata_server.auth.token_file import TokenRecord

_RANK: Final = {token: rank for rank, token in enumerate(Token)}
_HALF: Final = 16
_NEVER: Final = float("inf")


class _Known(NamedTuple):
    rest: bytes
    """The half of its digest by which it is not looked up."""
    rank: int
    expires: float
    caller: Caller


class Tokens:
    """Bearer tokens by their digests; without any, everything is permitted.

    Args:
        tokens: that hold until the process ends, by their text.
        clock: seconds since 1970, by which tokens expire.
    """

    def __init__(
        self, tokens: Mapping[str, Token] | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._fixed = dict(
            _entry(
                digest(text.encode()),
                kind,
                _NEVER,
                Caller(f"env-{kind}", kind, "", kind is Token.ADMIN),
            )
            for text, kind in (tokens or {}).items()
        )
        self._known = dict(self._fixed)
        self._wanted = bool(self._fixed)

    def __bool__(self) -> bool:
        return self._wanted

    def take(self, records: Iterable[TokenRecord]) -> None:
        """These tokens in the place of those that were taken before. From now on a token is wanted,
        even if there is none."""
        self._known = self._fixed | dict(_of_record(record) for record in records)
        self._wanted = True

    def check(self, authorization: bytes, needed: Token) -> Caller:
        """See that a request may be done; returns who asks.

        Raises:
            RequestError: 401 without a known token, or with one that has expired, 403 with one that
            permits less.
        """
        if not self._wanted or needed is Token.NONE:
            return ANYBODY
        known = self._find(authorization)
        if known is None:
            raise RequestError(
                401,
                "unauthorized",
                "this server needs a bearer token that it knows (header Authorization: Bearer "
                "TOKEN)",
                "Authorization",
            )
        if known.expires <= self._clock():
            raise RequestError(401, "unauthorized", "this token has expired", "Authorization")
        if known.rank < _RANK[needed]:
            message = f"this token permits {known.caller.right}, and that needs {needed}"
            raise RequestError(403, "forbidden", message, "Authorization")
        return known.caller

    def whose(self, authorization: bytes) -> Caller | None:
        """Whose token this is, whatever it permits; None if nobody's."""
        known = self._find(authorization) if self._wanted else None
        return known.caller if known is not None else None

    def counts(self) -> dict[str, int]:
        """How many there are, by whether they have expired."""
        now = self._clock()
        expired = sum(known.expires <= now for known in self._known.values())
        return {"valid": len(self._known) - expired, "expired": expired}

    def next_expiry(self) -> float | None:
        """When the next of those that are valid expires; None if none does."""
        now = self._clock()
        return min(
            (known.expires for known in self._known.values() if now < known.expires < _NEVER),
            default=None,
        )

    def _find(self, authorization: bytes) -> _Known | None:
        kind, _, token = authorization.partition(b" ")
        if kind.lower() != b"bearer":
            return None
        # How long this takes tells something of a digest at most, and a digest does not tell its
        # token.
        found = digest(token.strip())
        known = self._known.get(found[:_HALF])
        return known if known is not None and compare_digest(known.rest, found[_HALF:]) else None


def _entry(found: bytes, right: Token, expires: float, caller: Caller) -> tuple[bytes, _Known]:
    return found[:_HALF], _Known(found[_HALF:], _RANK[right], expires, caller)


def _of_record(record: TokenRecord) -> tuple[bytes, _Known]:
    right = Token(record.right)
    caller = Caller(record.id, right, record.tenant, right is Token.ADMIN and not record.tenant)
    expires = _NEVER if record.expires is None else record.expires.timestamp()
    return _entry(bytes.fromhex(record.sha256), right, expires, caller)
