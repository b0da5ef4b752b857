"""Decoding of request bodies, with errors that name the field."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import inspect

from hicache_metadata_server.core.errors import RequestError, invalid, too_large
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.protocol import JSON, MSGPACK

if TYPE_CHECKING:
    from hicache_metadata_server.protocol import Limits

CONTENT_TYPES: Final = (JSON, MSGPACK)
GROUP_ENTRIES: Final = 256
"""Entries of a list that are converted at once in the search for an invalid one."""
VALUES_PER_ENTRY: Final = 4
"""Maximum of any request: a pair of keys of the SGLang protocol is two strings and two commas."""
VALUES_PER_SCOPE: Final = 16
# An unterminated string matches up to the end of the body. Without that, and without possessive
# quantifiers, each of its quotes would start another scan of the rest: quadratic time.
_TOKEN: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|,', re.DOTALL)


class BodyDecoder:
    """Decoder of the bodies of one route.

    Refusing a body costs at most twice as much as decoding a valid one of the maximum size: its
    values are counted before it is decoded, and an invalid entry is searched for by groups.
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
        # msgspec's own path has no index of the entry (`$.keys[...]`), so it is replaced.
        message, _, _ = str(error).partition(" - at `")
        try:
            raw = (
                msgspec.json.decode(body) if content_type == JSON else msgspec.msgpack.decode(body)
            )
        except (msgspec.DecodeError, UnicodeError, RecursionError) as unreadable:
            return RequestError(400, "malformed", f"the body cannot be read: {unreadable}", "body")
        field = _locate(raw, inspect.type_info(self._kind)).lstrip(".")
        return invalid(message, field)


def _locate(raw: object, wanted: inspect.Type) -> str:
    """Path of the first value in `raw` of a wrong type; "" for `raw` itself."""
    if isinstance(wanted, inspect.StructType) and isinstance(raw, dict):
        return _in_struct(msgspec.convert(raw, dict[Any, Any]), wanted)
    if not isinstance(raw, list):
        return ""
    entries = msgspec.convert(raw, list[Any])
    if isinstance(wanted, inspect.ListType):
        return _in_list(entries, wanted.item_type)
    if isinstance(wanted, inspect.TupleType) and len(entries) == len(wanted.item_types):
        return _in_tuple(entries, wanted.item_types)
    return ""


def _in_list(raw: list[Any], kind: inspect.Type) -> str:
    """Path of the first invalid entry."""
    # By groups: the cost of a conversion is in the call, so that one for each of 16,384 entries
    # would cost far more than decoding them.
    annotation = _annotation(kind)
    group = list.__class_getitem__(annotation)
    for start in range(0, len(raw), GROUP_ENTRIES):
        some = raw[start : start + GROUP_ENTRIES]
        if not _converts(some, group):
            i = next(i for i, entry in enumerate(some) if not _converts(entry, annotation))
            return f"[{start + i}]{_locate(some[i], kind)}"
    return ""


def _in_tuple(raw: list[Any], kinds: tuple[inspect.Type, ...]) -> str:
    for i, (entry, kind) in enumerate(zip(raw, kinds, strict=True)):
        if not _fits(entry, kind):
            return f"[{i}]{_locate(entry, kind)}"
    return ""


def _in_struct(raw: dict[Any, Any], wanted: inspect.StructType) -> str:
    fields = {field.encode_name: field for field in wanted.fields}
    for name, field in fields.items():
        if name not in raw:
            if field.required:
                return f".{name}"
        elif not _fits(raw[name], field.type):
            return f".{name}{_locate(raw[name], field.type)}"
    unknown = next((str(name) for name in raw if name not in fields), "")
    return f".{unknown}" if wanted.forbid_unknown_fields and unknown else ""


def _fits(raw: object, kind: inspect.Type) -> bool:
    return _converts(raw, _annotation(kind))


def _converts(raw: object, annotation: Any) -> bool:
    try:
        msgspec.convert(raw, annotation)
    except msgspec.ValidationError:
        return False
    return True


def _annotation(kind: inspect.Type) -> Any:
    """Annotation of a type description, for the types that requests have."""
    match kind:
        case inspect.StructType():
            return kind.cls
        case inspect.ListType():
            return list.__class_getitem__(_annotation(kind.item_type))
        case inspect.TupleType():
            return tuple.__class_getitem__(tuple(map(_annotation, kind.item_types)))
        case inspect.UnionType():
            return _union(kind)
        case inspect.IntType():
            return _bounded(int, ge=kind.ge, le=kind.le, gt=kind.gt, lt=kind.lt)
        case inspect.FloatType():
            return _bounded(float, ge=kind.ge, le=kind.le, gt=kind.gt, lt=kind.lt)
        case inspect.StrType():
            return _bounded(str, min_length=kind.min_length, pattern=kind.pattern)
        case inspect.BoolType():
            return bool
        case inspect.NoneType():
            return None
        case _:
            return Any


def _union(kind: inspect.UnionType) -> Any:
    first, *others = map(_annotation, kind.types)
    for other in others:
        first = first | other
    return first


def _bounded(kind: type, **bounds: Any) -> Any:
    from typing import Annotated

    return Annotated[
        kind, msgspec.Meta(**{name: bound for name, bound in bounds.items() if bound is not None})
    ]


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
