"""From bytes to typed requests, and refusals that name the field."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from msgspec import inspect

from hicache_metadata_server.protocol import JSON, MSGPACK
from hicache_metadata_server.service.refused import RefusedError, invalid

CONTENT_TYPES: Final = (JSON, MSGPACK)
_NAMED: Final = re.compile(r"field `([^`]+)`")


class Body:
    """Decodes the bodies of one route."""

    def __init__(self, kind: type[msgspec.Struct], content_types: tuple[str, ...]) -> None:
        self._kind = kind
        self._decoders: dict[str, msgspec.json.Decoder[Any] | msgspec.msgpack.Decoder[Any]] = {
            JSON: msgspec.json.Decoder(kind),
            MSGPACK: msgspec.msgpack.Decoder(kind),
        }
        self._content_types = content_types

    def decode(self, body: bytes, content_type: str) -> Any:
        """The request in a body.

        Raises:
            RefusedError: it is none.
        """
        if content_type not in self._content_types:
            raise RefusedError(415, "media_type", f"bodies are {' or '.join(self._content_types)}", "Content-Type")
        try:
            return self._decoders[content_type].decode(body)
        except msgspec.ValidationError as error:
            raise self._invalid(error, body, content_type) from error
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise RefusedError(400, "malformed", f"the body cannot be read: {error}", "body") from error

    def _invalid(self, error: msgspec.ValidationError, body: bytes, content_type: str) -> RefusedError:
        message, _, _ = str(error).partition(" - at `")
        try:
            raw = msgspec.json.decode(body) if content_type == JSON else msgspec.msgpack.decode(body)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as unreadable:
            return RefusedError(400, "malformed", f"the body cannot be read: {unreadable}", "body")
        where = _locate(raw, inspect.type_info(self._kind)).lstrip(".")
        return invalid(message, where)


def _locate(raw: object, wanted: inspect.Type) -> str:
    """Where the first value is that is not what is wanted; "" for `raw` itself. msgspec tells fields, and not entries of lists."""
    if isinstance(wanted, inspect.StructType) and isinstance(raw, dict):
        return _in_struct(msgspec.convert(raw, dict[Any, Any]), wanted)
    if not isinstance(raw, list):
        return ""
    entries = msgspec.convert(raw, list[Any])
    if isinstance(wanted, inspect.ListType):
        return _in_list(entries, [wanted.item_type] * len(entries))
    if isinstance(wanted, inspect.TupleType) and len(entries) == len(wanted.item_types):
        return _in_list(entries, list(wanted.item_types))
    return ""


def _in_list(raw: list[Any], kinds: list[inspect.Type]) -> str:
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
    try:
        msgspec.convert(raw, _annotation(kind))
    except msgspec.ValidationError:
        return False
    return True


def _annotation(kind: inspect.Type) -> Any:
    """The type that a description is about, as far as requests have such."""
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

    return Annotated[kind, msgspec.Meta(**{name: bound for name, bound in bounds.items() if bound is not None})]
