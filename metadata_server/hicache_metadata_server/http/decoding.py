"""Decoding of request bodies, with errors that name the field."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from hicache_metadata_server.core.errors import RequestError, invalid
from hicache_metadata_server.protocol import JSON, MSGPACK

CONTENT_TYPES: Final = (JSON, MSGPACK)

_NAMED: Final = re.compile(r"Object (?:missing required|contains unknown) field `(.*)`")


class BodyDecoder:
    """Decoder of the bodies of one route.

    Refusing a body costs at most twice as much as decoding it.
    """

    def __init__(self, kind: type[msgspec.Struct], content_types: tuple[str, ...]) -> None:
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
        # What is behind the wrong field may be no JSON at all.
        try:
            msgspec.json.decode(body) if content_type == JSON else msgspec.msgpack.decode(body)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as unreadable:
            return RequestError(400, "malformed", f"the body cannot be read: {unreadable}", "body")
        message, _, path = str(error).partition(" - at `$")
        field = path.removesuffix("`")
        # A field that is missing or unknown is not part of msgspec's path.
        if named := _NAMED.match(message):
            field += f".{named[1]}"
        return invalid(message, field.lstrip("."))
