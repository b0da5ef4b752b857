"""Decoding of request bodies, with errors that name the field."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hicache_metadata_server.core.errors import RequestError, invalid, too_large
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.protocol import JSON, MSGPACK

if TYPE_CHECKING:
    from hicache_metadata_server.protocol import Limits

CONTENT_TYPES: Final = (JSON, MSGPACK)
VALUES_PER_ENTRY: Final = 4
"""Maximum of any request: a pair of keys of the SGLang protocol is two strings and two commas."""
VALUES_PER_SCOPE: Final = 16
# An unterminated string matches up to the end of the body. Without that, and without possessive
# quantifiers, each of its quotes would start another scan of the rest: quadratic time.
_TOKEN: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|,', re.DOTALL)

_PATH_PART: Final = re.compile(r"\.\w+|\[[^]]*\]")
_NAMED: Final = re.compile(r"Object (?:missing required|contains unknown) field `(.*)`")


class BodyDecoder:
    """Decoder of the bodies of one route.

    Refusing a body costs at most twice as much as decoding a valid one of the maximum size: its
    values are counted before it is decoded, and an invalid entry is searched for by bisection.
    """

    def __init__(
        self, kind: type[msgspec.Struct], content_types: tuple[str, ...], limits: Limits = DEFAULTS
    ) -> None:
        self._kind = kind
        self._limits = limits
        # Made once for each route: building a decoder costs more than decoding a short body.
        self._decoders: dict[str, msgspec.json.Decoder[Any] | msgspec.msgpack.Decoder[Any]] = {
            JSON: msgspec.json.Decoder(kind),
            MSGPACK: msgspec.msgpack.Decoder(kind),
        }
        self._content_types = content_types

    def decode(self, body: bytes, content_type: str) -> Any:
        """Decode a body.

        Raises:
            RequestError: 400, 413, 415 or 422; the body is invalid.
        """
        if content_type not in self._content_types:
            raise RequestError(
                415, "media_type", f"bodies are {' or '.join(self._content_types)}", "Content-Type"
            )
        if exceeds_values(body, content_type, max_values(self._limits)):
            raise too_large(f"more than {self._limits.keys} entries", "body")
        try:
            return self._decoders[content_type].decode(body)
        except msgspec.ValidationError as error:
            raise self._invalid(error, body, content_type) from error
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise RequestError(
                400, "malformed", f"the body cannot be read: {error}", "body"
            ) from error

    def _invalid(
        self, error: msgspec.ValidationError, body: bytes, content_type: str
    ) -> RequestError:
        try:
            raw = (
                msgspec.json.decode(body) if content_type == JSON else msgspec.msgpack.decode(body)
            )
        except (msgspec.DecodeError, UnicodeError, RecursionError) as unreadable:
            return RequestError(400, "malformed", f"the body cannot be read: {unreadable}", "body")
        message, _, path = str(error).partition(" - at `$")
        field = _indexed(raw, self._kind, path.removesuffix("`"))
        # A field that is missing or unknown is not part of msgspec's path.
        named = _NAMED.match(message)
        return invalid(message, f"{field}.{named[1]}".lstrip(".") if named else field)


def _indexed(raw: Any, kind: type[msgspec.Struct], path: str) -> str:
    """Replace each `[...]` in a path of msgspec by the index of the first wrong entry.

    Found by bisection: without that entry the message has another error, or none.
    """
    wrong, field = _error_of(raw, kind), ""
    value: Any = raw
    for part in _PATH_PART.findall(path):
        if part == "[...]" and _is(list, value):
            entries: list[Any] = value[:]
            first, end = 0, len(entries)
            while end - first > 1:
                middle = (first + end) // 2
                # Not those before `first` either, so that all steps together convert each entry
                # once.
                value[:] = entries[first:middle]
                if _error_of(raw, kind) == wrong:
                    end = middle
                else:
                    first = middle
            value[:] = entries[first:end]
            field, value = f"{field}[{first}]", entries[first]
        else:
            field += part
            value = value.get(part[1:]) if _is(dict, value) else None
    return field.lstrip(".")


def _is(kind: type, value: object) -> bool:
    # Without a narrowing to a list of unknown entries.
    return isinstance(value, kind)


def _error_of(raw: Any, kind: type[msgspec.Struct]) -> str:
    try:
        msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def max_values(limits: Limits) -> int:
    """Upper bound on the values of any request within the limits."""
    return VALUES_PER_ENTRY * limits.keys + VALUES_PER_SCOPE * limits.scopes + 64


def exceeds_values(body: bytes, content_type: str, limit: int) -> bool:
    """Return True if a body has more than `limit` values (JSON: strings and commas).

    Without decoding it. The time to decode a body depends on its values, not on its bytes: 8 MiB
    can hold four million strings, and a decoder cannot be interrupted. Counting stops at the limit.
    """
    # Each value takes a byte at least, so that short bodies need no count.
    if len(body) <= limit:
        return False
    return _msgpack_exceeds(body, limit) if content_type == MSGPACK else _json_exceeds(body, limit)


def _json_exceeds(body: bytes, limit: int) -> bool:
    # Values are separated by commas, so few commas mean few values. Many commas may be part of
    # strings, and need the slower count.
    if body.count(b",") <= limit // 2:
        return False
    return next(itertools.islice(_TOKEN.finditer(body), limit, None), None) is not None


def _msgpack_exceeds(body: bytes, limit: int) -> bool:
    at, end = 0, len(body)
    # Nesting needs no stack: members follow their container and are counted like other values.
    for _ in range(limit):
        if at >= end:
            return False
        first = body[at]
        if step := _STEPS[first]:
            at += step
        else:
            width, more = _LENGTHS[first]
            at += 1 + width + more + int.from_bytes(body[at + 1 : at + 1 + width])
    return at < end


def _steps() -> bytes:
    """Size of a msgpack value by its first byte; 0 if a length field follows."""
    sizes = bytearray([1] * 256)
    for first in range(0xA0, 0xC0):
        sizes[first] = 1 + (first & 0x1F)
    for first, size in (
        (0xCA, 5),
        (0xCB, 9),
        (0xCC, 2),
        (0xCD, 3),
        (0xCE, 5),
        (0xCF, 9),
        (0xD0, 2),
        (0xD1, 3),
        (0xD2, 5),
        (0xD3, 9),
        (0xD4, 3),
        (0xD5, 4),
        (0xD6, 6),
        (0xD7, 10),
        (0xD8, 18),
        (0xDC, 3),
        (0xDD, 5),
        (0xDE, 3),
        (0xDF, 5),
    ):
        sizes[first] = size
    for first in _LENGTHS:
        sizes[first] = 0
    return bytes(sizes)


_LENGTHS: Final = {
    0xC4: (1, 0),
    0xC5: (2, 0),
    0xC6: (4, 0),
    0xC7: (1, 1),
    0xC8: (2, 1),
    0xC9: (4, 1),
    0xD9: (1, 0),
    0xDA: (2, 0),
    0xDB: (4, 0),
}
"""Width of the length field, and further header bytes, of binaries, extensions and strings."""
_STEPS: Final = _steps()
