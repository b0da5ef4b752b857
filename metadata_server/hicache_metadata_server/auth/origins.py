"""Requests that a browser sends for a page of somebody else, refused where no token tells them from
others.

A page of any site can make a browser send requests to this machine. A request across sites says so
in `Origin` or `Sec-Fetch-Site`; a site whose name was pointed at this machine (DNS rebinding) is
told by `Host`.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.core.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PRIVATE: Final = (".localhost", ".local", ".internal")
"""Names that nobody can register."""
OPTION: Final = "HICACHE_METADATA_ALLOWED_HOSTS"
MAX_KNOWN: Final = 1024
_OWN_SITE: Final = (b"same-origin", b"none")


class Origins:
    """Which requests may come from a browser.

    Known hosts are addresses, names that nobody can point here from outside (without a dot, or
    ending in one of `PRIVATE`), the machine's own name, and those that are given.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = {name.strip().lower() for name in allowed if name.strip()}
        self._names = self._allowed | {socket.gethostname().lower()}
        self._known = set[bytes]()
        """Values of `Host` that were seen to be known."""

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """See that no page of another site has sent a request.

        Raises:
            RequestError: one has, or may have.
        """
        host = headers.get(b"host", b"")
        if host not in self._known:
            self._check_host(host)
        origin = headers.get(b"origin")
        if origin is not None:
            self._check_origin(origin, host)
        elif headers.get(b"sec-fetch-site", b"none") not in _OWN_SITE:
            raise _refused(
                "a page of another site has sent this request, and this server has no tokens",
                "Sec-Fetch-Site",
            )

    def _check_host(self, host: bytes) -> None:
        name = _name_of(host)
        if not (self._is_private(name) or name in self._names):
            message = f"this server has no tokens, and does not know itself as {name[:100]!r}: name it in {OPTION}, or give the server tokens"
            raise _refused(message, "Host")
        if len(self._known) < MAX_KNOWN:
            self._known.add(host)

    def _check_origin(self, origin: bytes, host: bytes) -> None:
        _, _, place = origin.lower().partition(b"://")
        if not place or (place != host.lower() and _name_of(place) not in self._allowed):
            raise _refused(
                f"a page of {origin[:100].decode('latin-1')!r} has sent this request, and this "
                f"server has no tokens",
                "Origin",
            )

    def _is_private(self, name: str) -> bool:
        if "." not in name and ":" not in name:
            return True
        return name.endswith(PRIVATE) or _is_address(name)


def _name_of(place: bytes) -> str:
    """The host of `host:port`, without the brackets of an address of IPv6."""
    text = place.decode("latin-1").strip().lower()
    if text.startswith("["):
        address, _, rest = text[1:].partition("]")
        return address if not rest or rest.startswith(":") else text
    return text.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refused(message: str, field: str) -> RequestError:
    return RequestError(403, "forbidden", message, field)
