"""Decoding of request bodies, with errors that name the field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import inspect

from hicache_metadata_server.core.errors import RequestError, invalid, too_large
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.http.body_size import exceeds_values, max_values
from hicache_metadata_server.protocol import JSON, MSGPACK

if TYPE_CHECKING:
    from hicache_metadata_server.protocol import Limits

CONTENT_TYPES: Final = (JSON, MSGPACK)
GROUP_ENTRIES: Final = 256
"""Entries of a list that are converted at once in the search for an invalid one."""


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
