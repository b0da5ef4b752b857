"""Checks against cross-site requests and DNS rebinding, for servers without tokens.

A page of any site can make a browser send requests to this machine. A cross-site request has the
page's site in `Origin`, or says so in `Sec-Fetch-Site`. With DNS rebinding, the page's own host
name resolves to this machine, so that the browser sends no cross-site headers; its name is in
`Host`.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.core.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PRIVATE: Final = (".localhost", ".local", ".internal")
"""Top-level domains that nobody can register."""
OPTION: Final = "HICACHE_METADATA_ALLOWED_HOSTS"
MAX_CACHED_HOSTS: Final = 1024
_OWN_SITE: Final = (b"same-origin", b"none")


class OriginPolicy:
    """Checks of `Host`, `Origin` and `Sec-Fetch-Site`.

    Accepted in `Host` are addresses, names that nobody outside can register (without a dot, or
    ending in one of `PRIVATE`), the machine's own name, and the names in `allowed`.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = {name.strip().lower() for name in allowed if name.strip()}
        self._names = self._allowed | {socket.gethostname().lower()}
        # Clients send the same few values: parsing each of them once takes it off the fast path.
        self._accepted = set[bytes]()
        """Values of `Host` that were accepted before."""

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Check that no page of another site has sent a request.

        Raises:
            RequestError: 403; another site's page has sent it, or may have.
        """
        host = headers.get(b"host", b"")
        if host not in self._accepted:
            self._check_host(host)
        # `Origin` decides where there is one: old browsers send no `Sec-Fetch-Site`, and programs
        # send neither.
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
            message = (
                f"this server has no tokens, and does not know itself as {name[:100]!r}: name it "
                f"in {OPTION}, or give the server tokens"
            )
            raise _refused(message, "Host")
        # Any address is accepted, so that a client could make up values without end.
        if len(self._accepted) < MAX_CACHED_HOSTS:
            self._accepted.add(host)

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

    def _is_private(self, name: str) -> bool:
        if "." not in name and ":" not in name:
            return True
        return name.endswith(PRIVATE) or _is_address(name)


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
