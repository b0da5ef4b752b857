"""Tables of options and the driver reference have all that the code has."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest

from hicache_backends.hf3fs.config import TOKEN_VARIABLE
from hicache_backends.mooncake.config import SETTINGS
from hicache_metadata_server.settings import ServerSettings
from hicache_storage.engines.bridge_config import BridgeConfig
from hicache_storage.engines.lmcache.identity import AdapterConfig
from hicache_storage.engines.sglang.identity import SGLangBridgeConfig
from hicache_storage.engines.vllm.identity import TierConfig
from hicache_storage.objects import ObjectStorage
from hicache_storage.plugins import config_model, registry
from hicache_storage.spec import HiCacheStorage
from tests.docs.blocks import ROOT, pages

if TYPE_CHECKING:
    from collections.abc import Mapping

TABLE: Final = re.compile(
    r"<!-- options of (?P<model>[\w-]+) -->\n(?P<rows>.*?)<!-- end of options -->", re.DOTALL
)
LIMITS: Final = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}
"""Limits of a JSON schema, as the tables write them."""
COMMON: Final = BridgeConfig.__struct_fields__
PREFIX: Final = str(ServerSettings.model_config["env_prefix"])


def schema(model: type[msgspec.Struct]) -> dict[str, Any]:
    return msgspec.json.schema(model, schema_hook=lambda _: {"type": "object"})


def models() -> dict[str, dict[str, Any]]:
    """JSON schemas of the models, by the names that the pages have for them."""
    drivers = {name: config_model(registry().get(name)) for name in ("file", "hf3fs", "mooncake")}
    bridges = {
        "bridge": BridgeConfig,
        "sglang": SGLangBridgeConfig,
        "vllm": TierConfig,
        "lmcache": AdapterConfig,
    }
    schemas = {name: schema(model) for name, model in (drivers | bridges).items()}
    return schemas | {"server": ServerSettings.model_json_schema()}


def tables() -> dict[str, list[list[str]]]:
    """The cells of each table's rows, by the model's name."""
    return {
        found["model"]: [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
            for row in found["rows"].strip().splitlines()[2:]
        ]
        for page in pages()
        for found in TABLE.finditer(page.read_text("utf-8"))
    }


def variables(model: str, name: str) -> tuple[str, ...]:
    """Environment variables that stand for an option."""
    if model == "server":
        return (f"{PREFIX}{name}".upper(),)
    named = {
        "mooncake": {name: variables for name, (_, *variables) in SETTINGS.items()},
        "hf3fs": {"token": (TOKEN_VARIABLE,)},
    }
    return named.get(model, {}).get(name, ())


def default_text(value: object) -> str:
    if value is None or value == "" or value == {}:
        return ""
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    return f"{value:g}" if isinstance(value, (int, float)) else f"`{value}`"


def limits(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[str]:
    """What the second cell of an option has to say: its values, or the ends of its range."""
    kind = next(kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null")
    if "$ref" in kind:
        kind = definitions[kind["$ref"].rpartition("/")[2]]
    if kind.get("type") == "boolean":
        return ["`true` or `false`"]
    values = [f"`{value}`" for value in kind.get("enum", ())]
    return [*values, *(f"{words} {kind[key]:g}" for key, words in LIMITS.items() if key in kind)]


@pytest.mark.parametrize("model", models())
def test_a_table_has_the_options_of_its_model(model: str) -> None:
    found = models()[model]
    definitions = found.get("$defs", {})
    found = definitions[found["$ref"].rpartition("/")[2]] if "$ref" in found else found
    options = {
        name: field
        for name, field in found["properties"].items()
        if name not in COMMON or model not in ("sglang", "vllm", "lmcache")
    }
    expected = [
        [
            "<br>".join(f"`{each}`" for each in (name, *(f"${v}" for v in variables(model, name)))),
            "required"
            if name in found.get("required", ())
            # Mooncake's variables are asked before, so that the model has no defaults.
            else default_text(field.get("default") or SETTINGS.get(name, [""])[0])
            if model == "mooncake"
            else default_text(field.get("default")),
            " ".join(field["description"].split()).replace("|", "\\|"),
        ]
        for name, field in options.items()
    ]
    rows = tables()[model]
    assert [[names, default, meaning] for names, _, default, meaning in rows] == expected
    for (names, value, *_), field in zip(rows, options.values(), strict=True):
        assert [text for text in limits(field, definitions) if text not in value] == [], names


def test_the_driver_reference_names_all_that_a_driver_inherits() -> None:
    page = (ROOT / "docs" / "reference" / "driver-api.md").read_text("utf-8")
    inherited = [
        name
        for owner in ObjectStorage.__mro__[: ObjectStorage.__mro__.index(HiCacheStorage)]
        for name in vars(owner)
        if not name.startswith("_") and not hasattr(HiCacheStorage, name)
    ]
    assert [name for name in inherited if not re.search(rf"\b{name}\b", page)] == []
