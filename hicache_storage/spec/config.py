"""Configuration of drivers: typed models whose errors name the option and the fix."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, TypeVar

import msgspec

from hicache_storage.spec.arguments import MAX_SECONDS, did_you_mean
from hicache_storage.spec.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


class DriverConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every driver's config model.

    A subclass declares its options as typed fields; `Annotated[..., msgspec.Meta(description=...)]`
    documents them. Text is converted, so that `-c capacity=10GiB` works on a command line.
    """


ConfigT = TypeVar("ConfigT", bound=DriverConfig)


def parse_config(
    model: type[ConfigT], options: Mapping[str, object], *, also_known: Iterable[str] = ()
) -> ConfigT:
    """Build a `model` from plain options.

    Args:
        model: of the options.
        options: by name.
        also_known: names that somebody else reads, for the hint at a name that is nearly one.

    Raises:
        ConfigError: an unknown option (with the nearest known one), a missing one, or a bad value.
    """
    known = list(model.__struct_fields__)
    # Before `convert`, whose error for an unknown option does not say which known one is near.
    for name in options:
        if name not in known:
            hint = did_you_mean(str(name), [*known, *also_known])
            hint = hint or f"; known options: {', '.join(known) or 'none'}"
            raise ConfigError(f"unknown option {name!r}{hint}")
    try:
        config = msgspec.convert(dict(options), type=model, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad configuration: {_said(str(error))}") from error
    # After `convert`: text such as "nan" becomes a float only there.
    for name in known:
        _check_number(name, getattr(config, name))
    return config


def _check_number(name: str, value: object) -> None:
    """Check bounds that a model cannot state.

    NaN passes every comparison, and no lock waits as long as infinity.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(
            f"bad configuration: option {name!r}: must be a finite number, got {value!r}"
        )
    if name.endswith("_seconds") and isinstance(value, (int, float)) and value > MAX_SECONDS:
        raise ConfigError(
            f"bad configuration: option {name!r}: must be {MAX_SECONDS:.0f} seconds at most, got "
            f"{value!r}"
        )


def _said(error: str) -> str:
    """The option before what is wrong with it."""
    # msgspec puts the path behind the reason: "Expected `int`, got `str` - at `$.capacity`".
    what, _, name = error.rpartition(" - at `$.")
    hint = "; write true or false" if what.startswith("Expected `bool") else ""
    return f"option {name.rstrip('`')!r}: {what}{hint}" if what else error


def parse_bytes(size: int | str) -> int:
    """Return the number of bytes in `"1TiB"`, `"500MB"`, `"4096"` or 4096.

    `i` means powers of 1024, without it powers of 1000.

    Raises:
        ValueError: the text is not a size.
    """
    if isinstance(size, int):
        if size < 0:
            raise ValueError(f"a size must not be negative, got {size}")
        return size
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(
            f"{size!r} is not a size; write for example '10GiB', '500MB' or a number of bytes"
        )
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()])
