"""Options that the bridges of all engines share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

from msgspec import Meta, field

from hicache_storage.spec import ConfigError, DriverConfig, parse_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ConfigT = TypeVar("ConfigT", bound=DriverConfig)


class BridgeConfig(DriverConfig, frozen=True):
    """The options of every bridge, whatever the engine."""

    driver: Annotated[
        str, Meta(description="Driver that keeps the pages, as listed by `hicache drivers`.")
    ]
    driver_config: Annotated[dict[str, object], Meta(description="Options of the driver.")] = field(
        default_factory=dict[str, object]
    )
    tenant: Annotated[str, Meta(description="Tenant; pages are shared only within a tenant.")] = ""
    revision: Annotated[
        str, Meta(description="Revision of the weights, if the model's name does not identify it.")
    ] = ""
    salt: Annotated[
        str, Meta(description="Any text. Another salt makes all stored pages invisible.")
    ] = ""
    kv_dtype: Annotated[
        str, Meta(description="Logical KV dtype, if the engine does not name it (fp8).")
    ] = ""
    deadline_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="Time limit of a call. Stores that need more for a batch of 128 pages "
            "need a higher one; in SGLang it must be less than 10, because SGLang then gives up "
            "stopping a thread.",
        ),
    ] = 8.0


def parse_options(
    model: type[ConfigT],
    options: Mapping[str, object],
    *,
    where: str,
    engine_keys: Iterable[str] = (),
) -> ConfigT:
    """Parse the options of a bridge out of an engine's configuration.

    Args:
        model: the bridge's options.
        options: what the engine's configuration has.
        where: the place of the configuration, for messages.
        engine_keys: keys in there that the engine reads itself, and that are left out.

    Raises:
        ConfigError: a key is unknown, missing or has a bad value; the message names it.
    """
    own = {name: value for name, value in options.items() if name not in frozenset(engine_keys)}
    try:
        return parse_config(model, own, also_known=engine_keys)
    except ConfigError as error:
        raise ConfigError(f"hicache bridge: {where}: {error}") from error
