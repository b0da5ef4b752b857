"""Tables of options, made from the models that read them, between two comments of the pages that
show them.

`python scripts/docs/options.py` writes them anew; a test says so where a page is behind its model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hicache_storage.plugins import config_model, registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

DOCS: Final = Path(__file__).parents[2] / "docs"
_REGION: Final = re.compile(
    r"(<!-- options of (?P<model>[\w-]+) -->\n).*?(<!-- end of options -->)", re.DOTALL
)
# A range of the JSON schema, in words.
_BOUNDS: Final = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}
_UNITS: Final = (("_seconds", "seconds"), ("_bytes", "bytes"))
_SIZES: Final = frozenset(
    {
        "capacity",
        "min_free",
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
    found = _options(_schema(config_model(registry().get(name))), _variables(name))
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

    models: dict[str, type[BridgeConfig]] = {
        "": BridgeConfig,
        "sglang": SGLangBridgeConfig,
        "vllm": TierConfig,
        "lmcache": AdapterConfig,
    }
    common = BridgeConfig.__struct_fields__ if engine else ()
    found = _options(_schema(models[engine]), {})
    return [option for option in found if option.name not in common]


def server_settings() -> list[Option]:
    """The metadata server's settings; every one may come from the environment."""
    from hicache_metadata_server.settings import ServerSettings

    prefix = str(ServerSettings.model_config.get("env_prefix", ""))
    variables = {name: (f"{prefix}{name}".upper(),) for name in ServerSettings.model_fields}
    return _options(ServerSettings.model_json_schema(), variables)


MODELS: Final[dict[str, Callable[[], list[Option]]]] = {
    **{name: partial(driver_options, name) for name in ("file", "hf3fs", "mooncake")},
    "bridge": bridge_options,
    **{name: partial(bridge_options, name) for name in ("sglang", "vllm", "lmcache")},
    "server": server_settings,
}
"""What the comments of a page may name."""


def _schema(model: type[msgspec.Struct]) -> dict[str, Any]:
    # Of values whose type is `object` nothing is known.
    return msgspec.json.schema(model, schema_hook=lambda _: {"type": "object"})


def _options(schema: Mapping[str, Any], variables: Mapping[str, tuple[str, ...]]) -> list[Option]:
    """The options in a JSON schema, as msgspec and pydantic make it of a model."""
    definitions = schema.get("$defs", {})
    model = _resolved(schema, definitions)
    return [
        Option(
            name,
            _type(name, field, definitions),
            "required" if name in model.get("required", ()) else _default(field.get("default")),
            variables.get(name, ()),
            " ".join(field.get("description", "").split()),
        )
        for name, field in model["properties"].items()
    ]


def _resolved(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (
        definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    )
    return found


def _type(name: str, field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    kinds = [
        _resolved(kind, definitions)
        for kind in field.get("anyOf", [field])
        if kind.get("type") != "null"
    ]
    types = [kind.get("type") for kind in kinds]
    if name in _SIZES:
        return "size"
    if "enum" in kinds[0]:
        return ", ".join(f"`{value}`" for value in kinds[0]["enum"])
    if kinds[0].get("format") in ("path", "file-path"):
        return "file"
    if "array" in types:
        return "text or list" if "string" in types else "list"
    if types[0] in ("integer", "number"):
        unit = next((unit for end, unit in _UNITS if name.endswith(end)), "number")
        limits = [f"{words} {kinds[0][key]:g}" for key, words in _BOUNDS.items() if key in kinds[0]]
        return ", ".join([unit, *limits])
    return {"boolean": "`true` or `false`", "object": "object"}.get(str(types[0]), "text")


def _variables(driver: str) -> dict[str, tuple[str, ...]]:
    """Variables that stand for options, where a driver has some."""
    if driver == "mooncake":
        from hicache_backends.mooncake.config import FILE_VARIABLES, VARIABLES

        return {**VARIABLES, "config_path": FILE_VARIABLES}
    if driver == "hf3fs":
        from hicache_backends.hf3fs.config import TOKEN_VARIABLE

        return {"token": (TOKEN_VARIABLE,)}
    return {}


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
