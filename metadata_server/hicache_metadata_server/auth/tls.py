"""TLS of the server, with certificates that can be replaced while it runs."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


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
        for option, needed in (
            ("--tls-certificate", self._certificate),
            ("--tls-key", self._key),
            ("--tls-client-ca", self._client_ca),
        ):
            if needed is None:
                continue
            try:
                needed.read_bytes()
            except OSError as error:
                # OpenSSL's own error does not name the file.
                raise ValueError(
                    f"{option}: {needed} cannot be read: {error.strerror or error}"
                ) from error
        file = self._certificate
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
        return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; the server cannot ask for its password")
