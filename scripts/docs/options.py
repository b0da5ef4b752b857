"""Tables of options, made from the models that read them, between two comments of the pages that
show them.

`python scripts/docs/options.py` writes them anew; a test says so where a page is behind its model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import inspect

from hicache_storage.plugins import config_model, registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

DOCS: Final = Path(__file__).parents[2] / "docs"
_REGION: Final = re.compile(
    r"(<!-- options of (?P<model>[\w-]+) -->\n).*?(<!-- end of options -->)", re.DOTALL
)
# A range of the annotation, in words.
_BOUNDS: Final = (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than"))
_UNITS: Final = (("_seconds", "seconds"), ("_bytes", "bytes"))
_SIZES: Final = frozenset(
    {
        "capacity",
        "file_size",
        "usrbio_buffer",
        "global_segment_size",
        "local_buffer_size",
        "buffer_size",
    }
)


@dataclass(frozen=True)
class Option:
    """A row: `default` and `type` are Markdown."""

    name: str
    type: str
    default: str
    variables: tuple[str, ...]
    meaning: str


def filled(page: str) -> str:
    """A page's text with its tables as the models have them now.

    Raises:
        KeyError: a comment names a model that is none of `MODELS`.
    """
    return _REGION.sub(
        lambda match: match[1] + "\n" + _table(MODELS[match["model"]]()) + "\n" + match[3], page
    )


def driver_options(name: str) -> list[Option]:
    """The options of a driver that is installed."""
    found = _struct(config_model(registry().get(name)), _variables(name))
    if name != "mooncake":
        return found
    from hicache_backends.mooncake.config import DEFAULTS

    # Mooncake's variables and file are asked before these, so that the model has no defaults of its
    # own.
    return [
        replace(option, default=option.default or _default(DEFAULTS.get(option.name)))
        for option in found
    ]


def bridge_options(engine: str = "") -> list[Option]:
    """The options of every bridge, or those that only one engine's has."""
    from hicache_storage.engines.bridge_config import BridgeConfig
    from hicache_storage.engines.lmcache.identity import AdapterConfig
    from hicache_storage.engines.sglang.identity import SGLangBridgeConfig
    from hicache_storage.engines.vllm.identity import TierConfig

    if not engine:
        return _struct(BridgeConfig, {})
    models: dict[str, type[BridgeConfig]] = {
        "sglang": SGLangBridgeConfig,
        "vllm": TierConfig,
        "lmcache": AdapterConfig,
    }
    common = BridgeConfig.__struct_fields__
    return [option for option in _struct(models[engine], {}) if option.name not in common]


def server_settings() -> list[Option]:
    """The metadata server's settings; every one may come from the environment."""
    from hicache_metadata_server.settings import ServerSettings

    prefix = str(ServerSettings.model_config.get("env_prefix", ""))
    schema: dict[str, Any] = ServerSettings.model_json_schema()
    return [
        Option(
            name,
            _setting_type(name, schema["properties"][name], schema),
            _default(_plain(field.default)),
            (f"{prefix}{name}".upper(),),
            _one_line(field.description or ""),
        )
        for name, field in ServerSettings.model_fields.items()
    ]


MODELS: Final[dict[str, Callable[[], list[Option]]]] = {
    "file": lambda: driver_options("file"),
    "hf3fs": lambda: driver_options("hf3fs"),
    "mooncake": lambda: driver_options("mooncake"),
    "bridge": bridge_options,
    "sglang": lambda: bridge_options("sglang"),
    "vllm": lambda: bridge_options("vllm"),
    "lmcache": lambda: bridge_options("lmcache"),
    "server": server_settings,
}
"""What the comments of a page may name."""


def _struct(model: type[msgspec.Struct], variables: Mapping[str, tuple[str, ...]]) -> list[Option]:
    info = inspect.type_info(model)
    assert isinstance(info, inspect.StructType)
    return [_field(field, variables.get(field.encode_name, ())) for field in info.fields]


def _field(field: inspect.Field, variables: tuple[str, ...]) -> Option:
    schema: dict[str, Any] = getattr(field.type, "extra_json_schema", None) or {}
    if field.required:
        default = "required"
    elif field.default_factory is not msgspec.NODEFAULT:
        default = _default(field.default_factory())
    else:
        default = _default(field.default)
    return Option(
        field.encode_name,
        _struct_type(field.encode_name, field.type),
        default,
        variables,
        _one_line(str(schema.get("description", ""))),
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _struct_type(name: str, kind: inspect.Type) -> str:
    kind = kind.type if isinstance(kind, inspect.Metadata) else kind
    members = [
        kind.type if isinstance(kind, inspect.Metadata) else kind
        for kind in getattr(kind, "types", (kind,))
    ]
    members = [member for member in members if not isinstance(member, inspect.NoneType)]
    if name in _SIZES:
        return "size"
    if isinstance(members[0], inspect.LiteralType):
        return ", ".join(f"`{value}`" for value in members[0].values)
    words: dict[type, str] = {
        inspect.BoolType: "`true` or `false`",
        inspect.StrType: "text",
        inspect.DictType: "object",
        inspect.ListType: "list",
    }
    if any(isinstance(member, inspect.CollectionType) for member in members):
        return (
            "text or list"
            if any(isinstance(member, inspect.StrType) for member in members)
            else "list"
        )
    if type(members[0]) in words:
        return words[type(members[0])]
    return _number(name, {key: getattr(members[0], key, None) for key, _ in _BOUNDS})


def _setting_type(name: str, schema: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    choices = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    first = choices[0]
    if "$ref" in first:
        first = whole["$defs"][first["$ref"].rpartition("/")[2]]
    if "enum" in first:
        return ", ".join(f"`{value}`" for value in first["enum"])
    if first.get("format") in ("path", "file-path"):
        return "file"
    if first.get("type") in ("integer", "number"):
        keys = {
            "minimum": "ge",
            "exclusiveMinimum": "gt",
            "maximum": "le",
            "exclusiveMaximum": "lt",
        }
        return _number(name, {keys[key]: value for key, value in first.items() if key in keys})
    return {"boolean": "`true` or `false`", "array": "list"}.get(str(first.get("type")), "text")


def _number(name: str, bounds: Mapping[str, Any]) -> str:
    unit = next((unit for end, unit in _UNITS if name.endswith(end)), "number")
    limits = [f"{words} {bounds[key]:g}" for key, words in _BOUNDS if bounds.get(key) is not None]
    return ", ".join([unit, *limits])


def _variables(driver: str) -> dict[str, tuple[str, ...]]:
    """Variables that stand for options, where a driver has some."""
    if driver == "mooncake":
        from hicache_backends.mooncake.config import FILE_VARIABLES, VARIABLES

        return {**VARIABLES, "config_path": FILE_VARIABLES}
    if driver == "hf3fs":
        from hicache_backends.hf3fs.config import TOKEN_VARIABLE

        return {"token": (TOKEN_VARIABLE,)}
    return {}


def _plain(value: object) -> object:
    return getattr(value, "value", value)


def _default(value: object) -> str:
    if value is None or value == "" or value == {}:
        return ""
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value}" if isinstance(value, int) else f"`{value}`"


def _table(options: Iterable[Option]) -> str:
    rows = [["option", "value", "default", "meaning"], ["---"] * 4]
    for option in options:
        names = "<br>".join(
            f"`{name}`"
            for name in (option.name, *(f"${variable}" for variable in option.variables))
        )
        rows.append([names, option.type, option.default, option.meaning.replace("|", "\\|")])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


if __name__ == "__main__":
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text("utf-8")
        if (new := filled(text)) != text:
            page.write_text(new, "utf-8")
            print(f"wrote the tables of {page.relative_to(DOCS.parent)}")
