"""Messages as bodies: JSON or, by content type, msgpack."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

T = TypeVar("T")

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"


def encode(message: object, content_type: str = JSON) -> bytes:
    """A message as a body.

    Raises:
        ValueError: the content type is neither JSON nor msgpack.
    """
    if content_type == JSON:
        return msgspec.json.encode(message)
    if content_type == MSGPACK:
        return msgspec.msgpack.encode(message)
    raise ValueError(f"no message travels as {content_type!r}; {JSON} and {MSGPACK} do")


def decode(body: bytes, kind: type[T], content_type: str = JSON) -> T:
    """A body as a message.

    Raises:
        ValueError: the content type is neither JSON nor msgpack.
        msgspec.DecodeError: the body is no JSON or msgpack.
        msgspec.ValidationError: it is, and not this message.
    """
    if content_type == JSON:
        return msgspec.json.decode(body, type=kind)
    if content_type == MSGPACK:
        return msgspec.msgpack.decode(body, type=kind)
    raise ValueError(f"no message travels as {content_type!r}; {JSON} and {MSGPACK} do")
