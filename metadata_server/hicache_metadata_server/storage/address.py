"""Parser of the addresses of shared stores.

No message and no attribute for display contains a password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

PORT: Final = 6379
SENTINEL_PORT: Final = 26379
_SCHEME: Final = re.compile(r"(?:redis|valkey)(s?)(?:\+(cluster|sentinel))?|unix")
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::(\d{1,5}))?")
_ESCAPED: Final = (
    "in an address `/`, `?`, `#`, `@`, `[` and `]` of a password are written %2F, %3F, %23, %40, "
    "%5B and %5D"
)
_TLS: Final = ("ca", "certificate", "key")
_SENTINEL: Final = ("sentinel_user", "sentinel_password_file")


class AddressKind(StrEnum):
    """Topology behind an address."""

    ONE = "one"
    SOCKET = "socket"
    CLUSTER = "cluster"
    SENTINEL = "sentinel"
    """Sentinels, which name the primary."""


@dataclass(frozen=True)
class Credentials:
    """User and password, or the file of the password."""

    user: str = ""
    password: str = field(default="", repr=False)
    password_file: str = ""


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files; "" for a file that is not given."""

    ca: str = ""
    certificate: str = ""
    key: str = ""


@dataclass(frozen=True)
class Address:
    """Hosts, database, credentials and TLS files of a shared store."""

    kind: AddressKind
    redacted: str
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    """Path of the socket, for `AddressKind.SOCKET`."""
    name: str = ""
    """Name of the primary, for `AddressKind.SENTINEL`."""
    db: int = 0
    login: Credentials = Credentials()
    sentinel_login: Credentials = Credentials()
    tls: TlsFiles | None = None


def is_shared(url: str) -> bool:
    """Return True for an address of Redis or Valkey."""
    return "://" in url and _SCHEME.fullmatch(url.partition("://")[0]) is not None


def redacted(url: str) -> str:
    """Return an address without credentials and options, as logs and messages may show it."""
    scheme, mark, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    return scheme + mark + ("***@" if login or at else "") + place.partition("?")[0]


def parse_address(url: str) -> Address:
    """Parse an address.

    Raises:
        ValueError: it is not valid; the message shows nothing that could be part of a password.
    """
    parts = _parts(url)
    scheme = _SCHEME.fullmatch(parts.scheme)
    if scheme is None:
        raise ValueError(
            "store: a shared store is redis://HOST:PORT/DB, rediss://, redis+cluster://, "
            "redis+sentinel:// or unix:///PATH"
        )
    # A `/`, `?` or `#` in a password ends the host part early, and the rest of the password is
    # parsed as path or query. The only trace of it is the `@` that follows.
    if "@" in parts.path + parts.query + parts.fragment:
        raise ValueError(f"store: {_ESCAPED}")
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    kind = (
        AddressKind.SOCKET if parts.scheme == "unix" else AddressKind(scheme[2] or AddressKind.ONE)
    )
    secure = bool(scheme[1])
    options = _options(parts.query, kind, secure=secure)
    name, db, path = _place(kind, parts.path, options.pop("db", ""))
    if password and "password_file" in options:
        raise ValueError("store: the address has a password, and a password_file: leave one out")
    return Address(
        kind,
        redacted(url),
        _hosts(hosts, kind),
        path,
        name,
        db,
        Credentials(unquote(user), unquote(password), options.get("password_file", "")),
        Credentials(
            options.get("sentinel_user", ""), "", options.get("sentinel_password_file", "")
        ),
        TlsFiles(*(options.get(one, "") for one in _TLS)) if secure else None,
    )


def _parts(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        # The original message contains the credentials, hence also `from None`.
        raise ValueError(f"store: the address is not valid; {_ESCAPED}") from None


def _options(query: str, kind: AddressKind, *, secure: bool) -> dict[str, str]:
    known = ["password_file"]
    known += ["db"] if kind is AddressKind.SOCKET else []
    known += _TLS if secure else []
    known += _SENTINEL if kind is AddressKind.SENTINEL else []
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = set(options) - set(known)
    if unknown:
        # The message does not name them: with an unescaped `?` they are part of a password.
        why = "; those of TLS need rediss://" if unknown <= set(_TLS) else ""
        raise ValueError(
            f"store: an address of this kind has no options but {', '.join(known)}{why}"
        )
    for option in (*_TLS, "password_file", "sentinel_password_file"):
        # Checked here, since redis-py reads the files at the first connection only, and reports a
        # missing one as a broken connection.
        if option in options and not Path(options[option]).is_file():
            raise ValueError(f"store: {option}: there is no file {options[option]}")
    if options.get("key") and not options.get("certificate"):
        raise ValueError("store: key: a key needs its certificate")
    return options


def _place(kind: AddressKind, path: str, db: str) -> tuple[str, int, str]:
    """Return name of the primary, number of the database and path of the socket."""
    name, place = "", unquote(path)
    if kind is AddressKind.SOCKET:
        if not place:
            raise ValueError("store: a socket is unix:///PATH")
    elif kind is AddressKind.SENTINEL:
        name, _, db = place.removeprefix("/").partition("/")
        if not name:
            raise ValueError(
                "store: Sentinels are redis+sentinel://HOST:PORT,HOST:PORT/NAME or .../NAME/DB, "
                "with the primary's name"
            )
    else:
        db = place.strip("/")
    if db and not db.isdecimal():
        raise ValueError("store: the database is a number")
    if kind is AddressKind.CLUSTER and int(db or 0):
        raise ValueError("store: a cluster has no database but 0")
    return name, int(db or 0), place


def _hosts(text: str, kind: AddressKind) -> tuple[tuple[str, int], ...]:
    if kind is AddressKind.SOCKET:
        return ()
    found = list[tuple[str, int]]()
    for host in text.split(","):
        matched = _HOST.fullmatch(host)
        port = matched and (matched[2] or _default_port(kind))
        if not matched or not port or not 0 < int(port) < 65536:
            # The text after a colon may be a password whose host is missing.
            subject = f"{host!r} is" if ":" not in text else "one of the hosts is"
            raise ValueError(
                f"store: {subject} no HOST:PORT; a cluster is redis+cluster://HOST:PORT,HOST:PORT"
            )
        found.append((matched[1].strip("[]"), int(port)))
    if kind is AddressKind.ONE and len(found) > 1:
        raise ValueError(
            "store: several hosts are a cluster (redis+cluster://), or Sentinels "
            "(redis+sentinel://), which name the primary"
        )
    return tuple(found)


def _default_port(kind: AddressKind) -> str:
    return {AddressKind.ONE: str(PORT), AddressKind.SENTINEL: str(SENTINEL_PORT)}.get(kind, "")
