"""Tenants file: quotas of tenants, in TOML."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from hicache_metadata_server.auth.token_file import WRITABLE_BY_OTHERS
from hicache_metadata_server.core.tenants import NAME, Quota, Quotas

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic_core import ErrorDetails


class TenantQuota(BaseModel):
    """Limits of one tenant; None for no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_scopes: Annotated[int, Field(ge=0)] | None = None
    max_slots: Annotated[int, Field(ge=0)] | None = None
    max_bytes: Annotated[ByteSize, Field(ge=0)] | None = None
    """Slots times slot bytes, in all of its scopes; such as `"2TiB"`."""
    requests_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    burst: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Requests at once after a pause; by default as many as in a second."""

    @model_validator(mode="after")
    def _check_burst(self) -> TenantQuota:
        if self.burst is not None and self.requests_per_second is None:
            raise ValueError("burst needs requests_per_second")
        return self

    @property
    def quota(self) -> Quota:
        """The same limits as the service uses them."""
        return Quota(
            self.max_scopes,
            self.max_slots,
            self.max_bytes,
            self.requests_per_second,
            self.burst or 0.0,
        )


class TenantsFile(BaseModel):
    """Content of a tenants file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    default: TenantQuota = TenantQuota()
    """Limits of tenants without an entry."""
    tenants: dict[str, TenantQuota] = {}

    @model_validator(mode="after")
    def _check_names(self) -> TenantsFile:
        for name in self.tenants:
            # No token can have a tenant of another form: such a quota would limit nobody.
            if not re.fullmatch(NAME, name):
                raise ValueError(f"a tenant is called {NAME}, not {name!r}")
        return self


def _describe(error: ErrorDetails) -> str:
    """Message for one invalid field; for an unknown one, with the nearest known key."""
    where = ".".join(map(str, error["loc"])) or "the file"
    if error["type"] != "extra_forbidden":
        return f"{where}: {error['msg']}"
    known = TenantsFile.model_fields if len(error["loc"]) == 1 else TenantQuota.model_fields
    near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
    return f"{where}: there is no such key; " + (
        f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    )


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
            found = TenantsFile.model_validate(tomllib.load(file))
        except ValidationError as error:
            raise ValueError(f"{path}: {'; '.join(map(_describe, error.errors()))}") from error
        except (tomllib.TOMLDecodeError, UnicodeError) as error:
            raise ValueError(f"{path} is no TOML: {error}") from error
    return Quotas({name: one.quota for name, one in found.tenants.items()}, found.default.quota)
