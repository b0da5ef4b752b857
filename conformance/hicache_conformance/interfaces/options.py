"""The options of the foreign driver of this process's run, as a config model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import msgspec

from hicache_conformance.interfaces.interface import Setup
from hicache_conformance.interfaces.profile import current
from hicache_conformance.model.settings import Settings
from hicache_storage.spec import DriverConfig
from hicache_storage.spec.config import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping


def plain_options(setup: Setup, options: Mapping[str, object]) -> dict[str, Any]:
    """Options as the engine would have read them.

    JSON where they are JSON, numbers of bytes for sizes, else text.

    Raises:
        ValueError: a size is none.
    """
    given = {name: value for name, value in options.items() if value is not None}
    return {
        name: parse_bytes(str(value)) if name in setup.sizes else _json_or_text(value)
        for name, value in given.items()
    }


def _json_or_text(value: object) -> Any:
    if not isinstance(value, str):
        return value
    try:
        # The engine's own command line takes `extra_config` as JSON, so that `true` and `3` arrive
        # as such.
        return json.loads(value)
    except ValueError:
        return value


def _model() -> type[DriverConfig]:
    """A model with a field for each option that this run may set.

    What else stands on a command line is a mistake.
    """
    run, foreign = Settings.of_environment(), current()
    setup = foreign.setup if foreign else Setup()
    names = {*setup.options, *(run.config if run else ())}
    if setup.capacity_option:
        names.add(setup.capacity_option)
    fields = [(name, Any, None) for name in sorted(names)]
    model = msgspec.defstruct(
        "EngineConfig", fields, bases=(DriverConfig,), module=__name__, frozen=True, kw_only=True
    )
    return cast("type[DriverConfig]", model)


EngineConfig = _model()
