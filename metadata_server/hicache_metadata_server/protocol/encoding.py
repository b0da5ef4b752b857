"""Encoding of messages as JSON or, by content type, msgpack."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

T = TypeVar("T")

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"


def encode(message: object, content_type: str = JSON) -> bytes:
    """Encode a message.

    Raises:
        ValueError: the content type is neither JSON nor msgpack.
    """
    if content_type == JSON:
        return msgspec.json.encode(message)
    if content_type == MSGPACK:
        return msgspec.msgpack.encode(message)
    raise ValueError(f"unknown content type {content_type!r}; use {JSON} or {MSGPACK}")


def decode(body: bytes, kind: type[T], content_type: str = JSON) -> T:
    """Decode a message.

    Raises:
        ValueError: the content type is neither JSON nor msgpack.
        msgspec.DecodeError: the body is not JSON, or not msgpack.
        msgspec.ValidationError: the body is another message.
    """
    if content_type == JSON:
        return msgspec.json.decode(body, type=kind)
    if content_type == MSGPACK:
        return msgspec.msgpack.decode(body, type=kind)
    # Never guessed: some bodies are valid in both, with different contents.
    raise ValueError(f"unknown content type {content_type!r}; use {JSON} or {MSGPACK}")
