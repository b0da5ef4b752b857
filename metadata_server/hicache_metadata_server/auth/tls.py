"""TLS of the server, with certificates that can be replaced while it runs."""

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
"""Tag of a time with a two-digit year; the other one, GeneralizedTime, has four digits."""


class ServerTls:
    """TLS context of a listening socket, TLS 1.2 at least.

    New connections use the certificates that were read last.

    Args:
        client_ca: clients need a certificate signed by one of these authorities.

    Raises:
        ValueError: a file cannot be read or is invalid, or key and certificate do not match.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        self.files = [file for file in (certificate, key, client_ca) if file is not None]
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        self.expiries: dict[str, float] = {}
        """Earliest expiry in each file, in seconds since 1970."""
        self._current = self.context = self._read()
        # A listening socket cannot be given another context. The callback is the one place where a
        # connection can: `ssl` calls it in every handshake.
        self.context.sni_callback = self._choose

    def reload(self) -> None:
        """Read the files again, for new connections.

        Raises:
            ValueError: a file cannot be read or is invalid; nothing has changed.
        """
        self._current = self._read()

    def _choose(
        self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext
    ) -> None:
        # `name` does not matter: it is None if the client names no server.
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
            # Only for metrics: OpenSSL judges the certificate below.
            if needed is not self._key:
                with contextlib.suppress(ValueError):
                    expiries[str(needed)] = first_expiry(text)
        try:
            context.load_cert_chain(file, self._key, _no_password)
            if self._client_ca is not None:
                file = self._client_ca
                context.load_verify_locations(file)
                context.verify_mode = ssl.CERT_REQUIRED
                # No session tickets: a resumed session skips the client's certificate, so that a
                # removed authority would stay trusted.
                context.options |= ssl.OP_NO_TICKET
                context.num_tickets = 0
        except ssl.SSLError as error:
            raise ValueError(f"{file} cannot be used: {error.reason or error}") from error
        self.expiries = expiries
        return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; the server cannot ask for its password")


def first_expiry(pem: str) -> float:
    """Earliest expiry of the certificates in a PEM text, in seconds since 1970.

    Raises:
        ValueError: there is no certificate, or one is invalid.
    """
    # By hand: `ssl` decodes the certificates of peers and authorities, not one's own.
    try:
        return min(_not_after(ssl.PEM_cert_to_DER_cert(found)) for found in _PEM.findall(pem))
    except IndexError as error:
        raise ValueError("a certificate is cut short") from error


def _not_after(der: bytes) -> float:
    # RFC 5280: Certificate -> TBSCertificate: [version], serial number, signature, issuer, validity
    # -> not before, not after.
    at = _element(der, _element(der, 0)[1])[1]
    for _ in range(4 if der[at] == _VERSION else 3):
        at = _element(der, at)[2]
    at = _element(der, _element(der, at)[1])[2]
    kind, begin, end = _element(der, at)
    text = der[begin:end].decode("ascii")
    if kind == _UTC_TIME:
        # RFC 5280, 4.1.2.5.1: 50 to 99 are of the last century.
        text = ("20" if text < "5" else "19") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Parse a DER element; returns its tag, and begin and end of its content."""
    length, begin = der[at + 1], at + 2
    if length & 0x80:
        begin += length & 0x7F
        length = int.from_bytes(der[at + 2 : begin], "big")
    return der[at], begin, begin + length
