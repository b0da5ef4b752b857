"""Checks of a config's fields; the name is the field's, and what is wrong a `ConfigError`."""

from __future__ import annotations

from enum import StrEnum
from types import NoneType
from typing import TypeVar

from hicache_storage.spec import ConfigError, parse_bytes

ChoiceT = TypeVar("ChoiceT", bound=StrEnum)


def named(kinds: tuple[type, ...]) -> str:
    """Kinds as a message names them."""
    return " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)


def check_count(name: str, count: int) -> None:
    """Refuse what is no number from 1 on."""
    if type(count) is not int or count < 1:
        raise ConfigError(f"{name} must be a whole number from 1 on, got {count!r}")


def check_pages(name: str, slots: int, page_size: int) -> None:
    """Refuse slots that are not whole pages."""
    check_count(name, slots)
    if slots % page_size:
        fitting = -(-slots // page_size) * page_size
        raise ConfigError(f"{name} must be a multiple of page_size ({page_size}), got {slots}; pass {fitting}")


def slots_in(name: str, size: int | str, page_size: int, page_bytes: int) -> int:
    """Slots of a size in slots, or of the whole pages that fit into memory."""
    if not isinstance(size, str):
        check_pages(name, size, page_size)
        return size
    try:
        pages = parse_bytes(size) // page_bytes
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
    if not pages:
        raise ConfigError(f"{name} is {size!r}, and a page takes {page_bytes} bytes; give room for one at least")
    return pages * page_size


def choice(name: str, kind: type[ChoiceT], value: str) -> ChoiceT:
    """The member that a text stands for."""
    try:
        return kind(value)
    except ValueError as error:
        raise ConfigError(f"{name} must be one of {', '.join(kind)}; got {value!r}") from error
