"""The expiry of the certificates in a PEM file, for metrics: `ssl` tells it of authorities only."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from typing import Final

_PEM: Final = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
"""With a year of two digits; the other kind of time has four."""


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
