"""A file of quotas."""

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
    """What one tenant may have; a limit that is left out is none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_scopes: Annotated[int, Field(ge=0)] | None = None
    max_slots: Annotated[int, Field(ge=0)] | None = None
    max_bytes: Annotated[ByteSize, Field(ge=0)] | None = None
    """Slots times slot bytes, in all of its scopes; such as `"2TiB"`."""
    requests_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    burst: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Requests at once after a pause; as many as in a second, if it is left out."""

    @model_validator(mode="after")
    def _check_burst(self) -> TenantQuota:
        if self.burst is not None and self.requests_per_second is None:
            raise ValueError("burst needs requests_per_second")
        return self

    @property
    def quota(self) -> Quota:
        """As the service counts it."""
        return Quota(
            self.max_scopes,
            self.max_slots,
            self.max_bytes,
            self.requests_per_second,
            self.burst or 0.0,
        )


class TenantsFile(BaseModel):
    """All of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    default: TenantQuota = TenantQuota()
    """Of tenants that are not named."""
    tenants: dict[str, TenantQuota] = {}

    @model_validator(mode="after")
    def _check_names(self) -> TenantsFile:
        for name in self.tenants:
            if not re.fullmatch(NAME, name):
                raise ValueError(f"a tenant is called {NAME}, not {name!r}")
        return self


def _told(error: ErrorDetails) -> str:
    """What is wrong with one field; for an unknown one, which may be meant."""
    where = ".".join(map(str, error["loc"])) or "the file"
    if error["type"] != "extra_forbidden":
        return f"{where}: {error['msg']}"
    known = TenantsFile.model_fields if len(error["loc"]) == 1 else TenantQuota.model_fields
    near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
    return f"{where}: there is no such key; " + (
        f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    )


def read_tenants_file(path: Path) -> Quotas:
    """The quotas in a TOML file.

    Raises:
        ValueError: it is not as it must be, or somebody else than its owner may change it.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_mode & WRITABLE_BY_OTHERS:
            raise ValueError(f"{path} may be changed by others than its owner: chmod go-w {path}")
        try:
            found = TenantsFile.model_validate(tomllib.load(file))
        except ValidationError as error:
            raise ValueError(f"{path}: {'; '.join(map(_told, error.errors()))}") from error
        except (tomllib.TOMLDecodeError, UnicodeError) as error:
            raise ValueError(f"{path} is no TOML: {error}") from error
    return Quotas({name: one.quota for name, one in found.tenants.items()}, found.default.quota)
