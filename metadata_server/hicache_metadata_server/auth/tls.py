"""TLS of the server: what a handshake asks for, and certificates that change while it runs."""

from __future__ import annotations

import contextlib
import re
import ssl
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_PEM: Final = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
"""With a year of two digits; the other kind of time has four."""


class ServerTls:
    """A context for a listening socket, which gives every new connection the certificates that were
    read last.

    TLS 1.2 at least. With `client_ca` a client has to show a certificate that one of these has
    signed.

    Raises:
        ValueError: a file cannot be read or is none of what it must be, or key and certificate do
        not belong together.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        self.files = [file for file in (certificate, key, client_ca) if file is not None]
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self.expiries: dict[str, float] = {}
        """When the first certificate of each file expires, by the file, in seconds since 1970."""
        self._current = self.context = self._read()
        self.context.sni_callback = self._choose

    def reload(self) -> None:
        """Read the files again; connections that are open go on as they are.

        Raises:
            ValueError: they are none, or cannot be read; nothing has changed.
        """
        self._current = self._read()

    def _choose(
        self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext
    ) -> None:
        # Called in every handshake, whether the client names a server or not.
        connection.context = self._current

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        file, expiries = self._certificate, dict[str, float]()
        for option, needed in (
            ("--tls-certificate", self._certificate),
            ("--tls-key", self._key),
            ("--tls-client-ca", self._client_ca),
        ):
            if needed is None:
                continue
            try:
                text = needed.read_text("ascii", "replace")
            except OSError as error:
                # OpenSSL's own error does not name the file.
                raise ValueError(
                    f"{option}: {needed} cannot be read: {error.strerror or error}"
                ) from error
            if needed is not self._key:
                with contextlib.suppress(ValueError):
                    expiries[str(needed)] = first_expiry(text)
        try:
            context.load_cert_chain(file, self._key, _no_password)
            if self._client_ca is not None:
                file = self._client_ca
                context.load_verify_locations(file)
                context.verify_mode = ssl.CERT_REQUIRED
                # A client is judged by the authorities of today, not by what it showed in an
                # earlier connection.
                context.options |= ssl.OP_NO_TICKET
                context.num_tickets = 0
        except ssl.SSLError as error:
            raise ValueError(f"{file} cannot be used: {error.reason or error}") from error
        self.expiries = expiries
        return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; the server cannot ask for its password")


def first_expiry(pem: str) -> float:
    """The time when the first of these certificates expires, in seconds since 1970.

    Raises:
        ValueError: there is no certificate, or one is not as it must be.
    """
    try:
        return min(_not_after(ssl.PEM_cert_to_DER_cert(found)) for found in _PEM.findall(pem))
    except IndexError as error:
        raise ValueError("a certificate is cut short") from error


def _not_after(der: bytes) -> float:
    # Certificate -> TBSCertificate: [version], serial number, signature, issuer, validity -> not
    # before, not after (RFC 5280).
    at = _element(der, _element(der, 0)[1])[1]
    for _ in range(4 if der[at] == _VERSION else 3):
        at = _element(der, at)[2]
    at = _element(der, _element(der, at)[1])[2]
    kind, begin, end = _element(der, at)
    text = der[begin:end].decode("ascii")
    if kind == _UTC_TIME:
        text = ("20" if text < "5" else "19") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """The element that begins there: its tag, and where its content begins and ends."""
    length, begin = der[at + 1], at + 2
    if length & 0x80:
        begin += length & 0x7F
        length = int.from_bytes(der[at + 2 : begin], "big")
    return der[at], begin, begin + length
