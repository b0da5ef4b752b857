"""TLS of a client of the metadata server."""

from __future__ import annotations

import ssl


def client_context(*, ca: str = "", certificate: str = "", key: str = "") -> ssl.SSLContext:
    """Create the TLS context of a client: TLS 1.2 at least, and a verified server name.

    Args:
        ca: PEM file of the trusted authorities; "" for the system's.
        certificate: PEM file of the client's own certificate; "" for none.
        key: PEM file of its key; "" if the key is in the file of the certificate.

    Raises:
        ValueError: a file cannot be read, or has other contents; the message names it.
    """
    if key and not certificate:
        raise ValueError("a key needs its certificate")
    file = ca
    try:
        context = ssl.create_default_context(cafile=ca or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if certificate:
            file = certificate
            # Without a callback, OpenSSL asks for the password of an encrypted key on the terminal.
            context.load_cert_chain(certificate, key or None, _no_password)
    except ssl.SSLError as error:
        raise ValueError(f"{file} cannot be used for TLS: {error.reason or error}") from error
    except OSError as error:
        raise ValueError(
            f"{file or 'the key'} cannot be read: {error.strerror or error}"
        ) from error
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one without a password")
