"""Decoding of request bodies, with errors that name the field."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from hicache_metadata_server.core.errors import RequestError, invalid
from hicache_metadata_server.protocol import JSON, MSGPACK

CONTENT_TYPES: Final = (JSON, MSGPACK)

_PATH_PART: Final = re.compile(r"\.\w+|\[[^]]*\]")
_NAMED: Final = re.compile(r"Object (?:missing required|contains unknown) field `(.*)`")


class BodyDecoder:
    """Decoder of the bodies of one route.

    Refusing a body costs at most twice as much as decoding a valid one of the maximum size: an
    invalid entry is searched for by bisection.
    """

    def __init__(self, kind: type[msgspec.Struct], content_types: tuple[str, ...]) -> None:
        self._kind = kind
        # Made once for each route: building a decoder costs more than decoding a short body.
        self._decoders: dict[str, msgspec.json.Decoder[Any] | msgspec.msgpack.Decoder[Any]] = {
            JSON: msgspec.json.Decoder(kind),
            MSGPACK: msgspec.msgpack.Decoder(kind),
        }
        self._content_types = content_types

    def decode(self, body: bytes, content_type: str) -> Any:
        """Decode a body.

        Raises:
            RequestError: 400, 415 or 422; the body is invalid.
        """
        if content_type not in self._content_types:
            raise RequestError(
                415, "media_type", f"bodies are {' or '.join(self._content_types)}", "Content-Type"
            )
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
