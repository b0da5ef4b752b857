"""Tenants file: quotas of tenants, in TOML."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from hicache_metadata_server.auth.token_file import WRITABLE_BY_OTHERS
from hicache_metadata_server.core.tenants import NAME, Quota, Quotas
from hicache_storage.spec.config import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

TABLES: Final = ("default", "tenants")
LIMITS: Final = tuple(field.encode_name for field in msgspec.structs.fields(Quota))


def read_tenants_file(path: Path) -> Quotas:
    """Read the quotas of a tenants file.

    Raises:
        ValueError: the content is invalid, or others than the owner may change the file.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        # The open file's mode and not the path's, which may name another file by now.
        if os.fstat(file.fileno()).st_mode & WRITABLE_BY_OTHERS:
            raise ValueError(f"{path} may be changed by others than its owner: chmod go-w {path}")
        try:
            found = tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeError) as error:
            raise ValueError(f"{path} is no TOML: {error}") from error
    try:
        _check_keys(found, TABLES, "")
        tenants = msgspec.convert(found.get("tenants", {}), dict[str, Any])
        for name in tenants:
            # No token can have a tenant of another form: such a quota would limit nobody.
            if not re.fullmatch(NAME, name):
                raise ValueError(f"a tenant is called {NAME}, not {name!r}")
        return Quotas(
            {name: _quota(one, f"tenants.{name}") for name, one in tenants.items()},
            _quota(found.get("default", {}), "default"),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _quota(table: Any, where: str) -> Quota:
    if isinstance(table, dict):
        limits = cast("dict[str, Any]", table)
        _check_keys(limits, LIMITS, f"{where}.")
        if isinstance(size := limits.get("max_bytes"), str):
            try:
                table = {**limits, "max_bytes": parse_bytes(size)}
            except ValueError as error:
                raise ValueError(f"{where}.max_bytes: {error}") from error
    try:
        return msgspec.convert(table, Quota)
    except msgspec.ValidationError as error:
        message, _, field = str(error).partition(" - at `$")
        raise ValueError(f"{where}{field.rstrip('`')}: {message}") from error


def _check_keys(table: Collection[str], known: Collection[str], where: str) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"{where}{key}: there is no such key; {hint}")
