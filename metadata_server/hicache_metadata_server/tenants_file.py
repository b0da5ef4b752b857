"""A file of quotas."""

from __future__ import annotations

import os
import re
import tomllib
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from hicache_metadata_server.service.tenants import NAME, Quota, Quotas
from hicache_metadata_server.token_file import WRITABLE_BY_OTHERS

if TYPE_CHECKING:
    from pathlib import Path


class TenantQuota(BaseModel):
    """What one tenant may have; a limit that is left out is none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    most_scopes: Annotated[int, Field(ge=0)] | None = None
    most_slots: Annotated[int, Field(ge=0)] | None = None
    most_bytes: Annotated[ByteSize, Field(ge=0)] | None = None
    """Slots times slot bytes, in all of its scopes; such as `"2TiB"`."""
    requests_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    burst: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Requests at once after a pause; as many as in a second, if it is left out."""

    @model_validator(mode="after")
    def _see_burst(self) -> TenantQuota:
        if self.burst is not None and self.requests_per_second is None:
            raise ValueError("burst needs requests_per_second")
        return self

    @property
    def quota(self) -> Quota:
        """As the service counts it."""
        return Quota(self.most_scopes, self.most_slots, self.most_bytes, self.requests_per_second, self.burst or 0.0)


class TenantsFile(BaseModel):
    """All of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    default: TenantQuota = TenantQuota()
    """Of tenants that are not named."""
    tenants: dict[str, TenantQuota] = {}

    @model_validator(mode="after")
    def _see_names(self) -> TenantsFile:
        for name in self.tenants:
            if not re.fullmatch(NAME, name):
                raise ValueError(f"a tenant is called {NAME}, not {name!r}")
        return self


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
            told = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'the file'}: {one['msg']}" for one in error.errors())
            raise ValueError(f"{path}: {told}") from error
        except (tomllib.TOMLDecodeError, UnicodeError) as error:
            raise ValueError(f"{path} is no TOML: {error}") from error
    return Quotas({name: one.quota for name, one in found.tenants.items()}, found.default.quota)
