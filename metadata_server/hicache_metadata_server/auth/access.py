"""Checks of each request: its token, and the site that has sent it."""

from __future__ import annotations

import ipaddress
import socket
import time
from functools import lru_cache
from hmac import compare_digest
from typing import TYPE_CHECKING, Final, NamedTuple

from hicache_metadata_server.auth.files import digest
from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.core.limits import ANYBODY, Caller
from hicache_metadata_server.protocol import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hicache_metadata_server.auth.files import TokenRecord

PRIVATE: Final = (".localhost", ".local", ".internal")
"""Top-level domains that nobody can register."""
OPTION: Final = "HICACHE_METADATA_ALLOWED_HOSTS"
MAX_CACHED_HOSTS: Final = 1024
_OWN_SITE: Final = (b"same-origin", b"none")
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

    `tokens` has rights by token, of tokens that stay valid until the process ends. `clock` returns
    seconds since 1970, for expiry.
    """

    def __init__(
        self, tokens: Mapping[str, Token] | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._fixed = dict(
            _entry(digest(text.encode()), f"env-{right}", right)
            for text, right in (tokens or {}).items()
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
        self._known = self._fixed | dict(
            _entry(
                bytes.fromhex(one.sha256),
                one.id,
                Token(one.right),
                one.tenant,
                _NEVER if one.expires is None else one.expires.timestamp(),
            )
            for one in records
        )
        # Also for an empty file: revoking the last token must not open the server to everybody.
        self._required = True

    def check(self, authorization: bytes, needed: Token) -> Caller:
        """Check the token of a request; returns its caller.

        Raises:
            RequestError: 401 for a missing, unknown or expired token, 403 for an insufficient right.
        """
        if not self._required:
            return ANYBODY
        known = self._find(authorization)
        if known is None:
            header = "header Authorization: Bearer TOKEN"
            message = f"this server needs a bearer token that it knows ({header})"
            raise RequestError(401, "unauthorized", message, "Authorization")
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


def _entry(
    found: bytes, name: str, right: Token, tenant: str = "", expires: float = _NEVER
) -> tuple[bytes, _Known]:
    caller = Caller(name, right, tenant, right is Token.ADMIN and not tenant)
    return found[:_HALF], _Known(found[_HALF:], _RANK[right], expires, caller)


class OriginPolicy:
    """Checks against cross-site requests and DNS rebinding, for servers without tokens.

    A page of any site can make a browser send requests to this machine. A cross-site request has
    the page's site in `Origin`, or says so in `Sec-Fetch-Site`. With DNS rebinding, the page's own
    host name resolves to this machine, so that the browser sends no cross-site headers; its name is
    in `Host`.

    Accepted in `Host` are addresses, names that nobody outside can register (without a dot, or
    ending in one of `PRIVATE`), the machine's own name, `host`, and the names in `allowed`. Accepted
    in `Origin` is the site that the request was sent to, and the hosts in `allowed`.
    """

    def __init__(self, tokens: Tokens, allowed: Iterable[str] = (), host: str = "") -> None:
        self._tokens = tokens
        self._allowed = {name.strip().lower() for name in allowed if name.strip()}
        self._names = self._allowed | {socket.gethostname().lower(), host.lower()}
        # Clients send the same few values of `Host`: each of them is parsed once.
        self._is_known = lru_cache(MAX_CACHED_HOSTS)(self._has_known_name)

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Check that no page of another site has sent a request.

        Raises:
            RequestError: 403; another site's page has sent it, or may have.
        """
        # Where there are tokens, another site's page has none, and a browser adds none by itself.
        if self._tokens:
            return
        host = headers.get(b"host", b"")
        if not self._is_known(host):
            message = (
                f"this server has no tokens, and does not know itself as {_name_of(host)[:100]!r}: "
                f"name it in {OPTION}, or give the server tokens"
            )
            raise _refused(message, "Host")
        # `Origin` decides where there is one: old browsers send no `Sec-Fetch-Site`, and programs
        # send neither.
        origin = headers.get(b"origin")
        if origin is not None:
            self._check_origin(origin, host)
        elif headers.get(b"sec-fetch-site", b"none") not in _OWN_SITE:
            message = "a page of another site has sent this request, and this server has no tokens"
            raise _refused(message, "Sec-Fetch-Site")

    def _has_known_name(self, host: bytes) -> bool:
        name = _name_of(host)
        is_private = name.endswith(PRIVATE) or ("." not in name and ":" not in name)
        return is_private or name in self._names or _is_address(name)

    def _check_origin(self, origin: bytes, host: bytes) -> None:
        # `null`, the origin of sandboxed frames and local files, has no `://` and is refused.
        _, _, site = origin.lower().partition(b"://")
        # Against the port as well: another server on this machine is another site.
        if not site or (site != host.lower() and _name_of(site) not in self._allowed):
            raise _refused(
                f"a page of {origin[:100].decode('latin-1')!r} has sent this request, and this "
                f"server has no tokens",
                "Origin",
            )


def _name_of(host_and_port: bytes) -> str:
    """Host of `host:port`, without the brackets of an IPv6 address."""
    text = host_and_port.decode("latin-1").strip().lower()
    if text.startswith("["):
        address, _, rest = text[1:].partition("]")
        return address if not rest or rest.startswith(":") else text
    # A dot at the end is legal in DNS and names the same host.
    return text.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refused(message: str, field: str) -> RequestError:
    return RequestError(403, "forbidden", message, field)
