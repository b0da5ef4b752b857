"""Parser of the addresses of shared stores, into arguments of redis-py's clients.

No message and no attribute for display contains a password.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError

from hicache_metadata_server.storage.store import SHARED

CLUSTER: Final = "cluster"
SENTINEL: Final = "sentinel"
SOCKET: Final = "socket"
ONE: Final = "one"

_PORTS: Final = {ONE: "6379", SENTINEL: "26379"}
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::(\d{1,5}))?")
_ESCAPED: Final = (
    "in an address `/`, `?`, `#`, `@`, `[` and `]` of a password are written %2F, %3F, %23, %40, "
    "%5B and %5D"
)
_TLS: Final = {"ca": "ssl_ca_certs", "certificate": "ssl_certfile", "key": "ssl_keyfile"}
_FILES: Final = (*_TLS, "password_file", "sentinel_password_file")


@dataclass(frozen=True)
class RedisAddress:
    """A shared store."""

    kind: str
    """`ONE`, `SOCKET`, `CLUSTER`, or `SENTINEL` for Sentinels that name the primary."""
    hosts: tuple[tuple[str, int], ...]
    name: str
    """Name of the primary, for Sentinels."""
    options: dict[str, Any] = field(repr=False)
    """Arguments for redis-py: credentials, database, path of the socket, TLS."""
    sentinel_options: dict[str, Any] = field(repr=False)
    """Arguments for the connections to the Sentinels."""


class PasswordFile(CredentialProvider):
    """Reads the password file for each new connection: it can be changed while servers run."""

    def __init__(self, user: str, file: str) -> None:
        self._user = user
        self._file = file

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return the password, or user and password.

        Raises:
            AuthenticationError: the file cannot be read, or is empty.
        """
        try:
            password = Path(self._file).read_text("utf-8").strip()
        except (OSError, UnicodeError) as error:
            # The text of a UnicodeError contains the bytes of the file, so only its type is shown.
            raise AuthenticationError(
                f"{self._file} cannot be read: {type(error).__name__}"
            ) from None
        if not password:
            raise AuthenticationError(f"{self._file} is empty")
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """Return the same; redis-py calls this method from its asynchronous connections."""
        return self.get_credentials()


def parse_address(url: str) -> RedisAddress:
    """Parse an address.

    Raises:
        ValueError: it is not valid; the message shows nothing that could be part of a password.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        # The original message contains the credentials, hence also `from None`.
        raise ValueError(f"store: the address is not valid; {_ESCAPED}") from None
    scheme = SHARED.fullmatch(parts.scheme)
    if scheme is None:
        raise ValueError(
            "store: a shared store is redis://HOST:PORT/DB, rediss://, redis+cluster://, "
            "redis+sentinel:// or unix:///PATH"
        )
    # A `/`, `?` or `#` in a password ends the host part early, and the rest of the password is
    # parsed as path or query. The only trace of it is the `@` that follows.
    if "@" in parts.path + parts.query + parts.fragment:
        raise ValueError(f"store: {_ESCAPED}")
    kind = SOCKET if parts.scheme == "unix" else scheme[2] or ONE
    query = _query(parts.query, kind, secure=bool(scheme[1]))
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    if password and "password_file" in query:
        raise ValueError("store: the address has a password, and a password_file: leave one out")
    tls: dict[str, Any] = {}
    if scheme[1]:
        tls = {
            "ssl": True,
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
            "ssl_min_version": ssl.TLSVersion.TLSv1_2,
            **{option: query[name] for name, option in _TLS.items() if name in query},
        }
    name, place = _place(kind, unquote(parts.path), query.get("db", ""))
    file = query.get("password_file", "")
    asked = _login(query.get("sentinel_user", ""), "", query.get("sentinel_password_file", ""))
    return RedisAddress(
        kind,
        _hosts(hosts, kind),
        name,
        {**tls, **place, **_login(unquote(user), unquote(password), file)},
        {**tls, **asked},
    )


def _login(user: str, password: str, file: str) -> dict[str, Any]:
    if file:
        return {"credential_provider": PasswordFile(user, file)}
    return {"username": user or None, "password": password or None}


def _query(query: str, kind: str, *, secure: bool) -> dict[str, str]:
    known = ["password_file"]
    known += ["db"] if kind == SOCKET else []
    known += _TLS if secure else []
    known += ["sentinel_user", "sentinel_password_file"] if kind == SENTINEL else []
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = set(options) - set(known)
    if unknown:
        # The message does not name them: with an unescaped `?` they are part of a password.
        why = "; those of TLS need rediss://" if unknown <= set(_TLS) else ""
        raise ValueError(
            f"store: an address of this kind has no options but {', '.join(known)}{why}"
        )
    for option in _FILES:
        # Checked here, since redis-py reads the files at the first connection only, and reports a
        # missing one as a broken connection.
        if option in options and not Path(options[option]).is_file():
            raise ValueError(f"store: {option}: there is no file {options[option]}")
    if options.get("key") and not options.get("certificate"):
        raise ValueError("store: key: a key needs its certificate")
    return options


def _place(kind: str, path: str, db: str) -> tuple[str, dict[str, Any]]:
    """Return name of the primary, and arguments for database and socket."""
    name, _, after = path.removeprefix("/").partition("/")
    if kind == SENTINEL and not name:
        raise ValueError(
            "store: Sentinels are redis+sentinel://HOST:PORT,HOST:PORT/NAME or .../NAME/DB, with "
            "the primary's name"
        )
    if kind == SOCKET and not path:
        raise ValueError("store: a socket is unix:///PATH")
    db = {SENTINEL: after, SOCKET: db}.get(kind, path.strip("/")) or "0"
    if not db.isdecimal():
        raise ValueError("store: the database is a number")
    if kind == CLUSTER:
        if int(db):
            raise ValueError("store: a cluster has no database but 0")
        return "", {}
    socket = {"unix_socket_path": path} if kind == SOCKET else {}
    return name if kind == SENTINEL else "", {"db": int(db), **socket}


def _hosts(text: str, kind: str) -> tuple[tuple[str, int], ...]:
    if kind == SOCKET:
        return ()
    found = list[tuple[str, int]]()
    for host in text.split(","):
        matched = _HOST.fullmatch(host)
        port = matched and (matched[2] or _PORTS.get(kind, ""))
        if not matched or not port or not 0 < int(port) < 65536:
            # The text after a colon may be a password whose host is missing.
            subject = f"{host!r} is" if ":" not in text else "one of the hosts is"
            raise ValueError(
                f"store: {subject} no HOST:PORT; a cluster is redis+cluster://HOST:PORT,HOST:PORT"
            )
        found.append((matched[1].strip("[]"), int(port)))
    if kind == ONE and len(found) > 1:
        raise ValueError(
            "store: several hosts are a cluster (redis+cluster://), or Sentinels "
            "(redis+sentinel://), which name the primary"
        )
    return tuple(found)
