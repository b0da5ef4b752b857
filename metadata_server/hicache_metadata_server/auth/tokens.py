"""Authentication: bearer tokens and their rights."""

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
    """Second half of the digest; the first one is the key of the table."""
    rank: int
    expires: float
    caller: Caller


class Tokens:
    """Table of bearer tokens by digest; without any token, everything is permitted.

    Args:
        tokens: rights by token, of tokens that stay valid until the process ends.
        clock: seconds since 1970, for expiry.
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
        self._required = bool(self._fixed)

    def __bool__(self) -> bool:
        """True if requests need a token."""
        return self._required

    def replace_records(self, records: Iterable[TokenRecord]) -> None:
        """Replace the records of an earlier token file.

        From now on requests need a token, even if there are no records.
        """
        self._known = self._fixed | dict(_of_record(record) for record in records)
        # Also for an empty file: revoking the last token must not open the server to everybody.
        self._required = True

    def check(self, authorization: bytes, needed: Token) -> Caller:
        """Check the token of a request; returns its caller.

        Raises:
            RequestError: 401 for a missing, unknown or expired token, 403 for an insufficient right.
        """
        if not self._required or needed is Token.NONE:
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

    def caller_of(self, authorization: bytes) -> Caller | None:
        """Caller of a token, even of an expired one; None for an unknown token."""
        known = self._find(authorization) if self._required else None
        return known.caller if known is not None else None

    def counts(self) -> dict[str, int]:
        """Number of valid and of expired tokens."""
        now = self._clock()
        expired = sum(known.expires <= now for known in self._known.values())
        return {"valid": len(self._known) - expired, "expired": expired}

    def next_expiry(self) -> float | None:
        """Next expiry of a valid token, in seconds since 1970; None if none expires."""
        now = self._clock()
        return min(
            (known.expires for known in self._known.values() if now < known.expires < _NEVER),
            default=None,
        )

    def _find(self, authorization: bytes) -> _Known | None:
        kind, _, token = authorization.partition(b" ")
        if kind.lower() != b"bearer":
            return None
        # A dictionary takes no constant time, but what its timing could reveal is half a digest, and
        # no token can be computed from that. The other half is compared in constant time.
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
