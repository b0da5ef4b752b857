"""Settings of the server.

Options of `hicache metadata serve`, or `HICACHE_METADATA_...` in the environment.
"""

from __future__ import annotations

import difflib
from pathlib import Path  # noqa: TC003 - pydantic reads the annotations
from typing import TYPE_CHECKING, Annotated, Final, Self

from msgspec import structs
from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.storage.store import is_shared

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Positive = Annotated[float, Field(gt=0)]
PREFIX: Final = "HICACHE_METADATA_"
CLIENT_VARIABLES: Final = ("URL", "TOKEN", "CA", "CERTIFICATE")
"""Variables with the same prefix that commands and drivers read; they are no misspelt settings."""


class ServerSettings(BaseSettings):
    """Settings of one server.

    Tokens come from a file or from the environment, never from the command line, which every user
    of the machine can see.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="ignore", frozen=True, use_attribute_docstrings=True
    )

    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` for all."""
    port: Annotated[int, Field(ge=0, le=65535)] = 18000
    """Port to listen on; 0 takes a free one, which the log names."""
    store: str = "memory:"
    """Where the map is stored: `memory:`; `sqlite:///FILE`, where an absolute path makes four
    slashes; or a Redis, such as `redis://HOST:PORT/DB`."""
    durability: p.StoreDurability = p.StoreDurability.PROCESS
    """What acknowledged changes survive: `process`, the death of the process; `machine`, a loss of
    power as well; `none`, for a Redis that keeps less."""
    store_replicas: Annotated[int, Field(ge=0)] = 0
    """Number of replicas of Redis that must have a change before it is acknowledged."""
    advertised_url: str = ""
    """Address at which clients reach this server, if several share a Redis; by default its host and
    port."""
    token_file: Path | None = None
    """Token file, made by `hicache metadata token` and read again when it changes. Without tokens,
    every client may do everything."""
    admin_token: SecretStr | None = None
    """Token with the right *admin*, in addition to those of the file. It is read from the
    environment only."""
    allowed_hosts: str = ""
    """Host names, separated by commas, by which clients address a server without tokens, in
    addition to IP addresses, names without a dot and the machine's own name. Pages of these hosts
    may send requests."""
    lease_seconds: Positive = DEFAULTS.lease_seconds
    """Default duration of a write lease. A client gets at most ten times this, and at most 600
    seconds."""
    quarantine_seconds: Annotated[float, Field(ge=0)] = DEFAULTS.quarantine_seconds
    """Time between the release of a slot and its reuse; longer than a reader takes from the lookup
    to the last byte."""
    tls_certificate: Path | None = None
    """PEM file of the server's certificate; with it the server speaks HTTPS."""
    tls_key: Path | None = None
    """PEM file of the certificate's private key. Both files are read again when they change."""
    tls_client_ca: Path | None = None
    """PEM file of authorities. Clients must present a certificate that one of them has signed."""
    tenants_file: Path | None = None
    """TOML file of the tenants' quotas, read again when it changes."""
    log_level: Annotated[str, Field(pattern="(?i)^(debug|info|warning|error)$")] = "info"
    """Lowest level that is logged: `debug`, `info`, `warning` or `error`."""
    log_format: Annotated[str, Field(pattern="^(json|console)$")] = "json"
    """Format of the log on standard error: `json`, one object a line, or `console`. Requests are
    not logged one by one."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        least, most = DEFAULTS.min_lease_seconds, DEFAULTS.max_lease_seconds
        if not least <= self.lease_seconds <= most:
            raise ValueError(f"lease_seconds must lie between {least:g} and {most:g}")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError(
                "tls_certificate and tls_key belong together: a certificate and a key, or neither"
            )
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError(
                "tls_client_ca needs tls_certificate and tls_key, which the server shows to its "
                "clients"
            )
        if self.store_replicas and not is_shared(self.store):
            raise ValueError("store_replicas is about a store in Redis")
        return self

    @property
    def limits(self) -> p.Limits:
        """Limits of requests, as `GET /v2` returns them."""
        return structs.replace(
            DEFAULTS,
            lease_seconds=self.lease_seconds,
            # A restored copy of a store gives no slot for this long: a server with short leases
            # must not wait for long ones.
            max_lease_seconds=min(10 * self.lease_seconds, DEFAULTS.max_lease_seconds),
            quarantine_seconds=self.quarantine_seconds,
        )

    def tokens(self) -> dict[str, p.Token]:
        """Tokens from the environment, with their rights.

        Raises:
            ValueError: the token is empty.
        """
        if self.admin_token is None:
            return {}
        text = self.admin_token.get_secret_value()
        # An empty variable usually comes from a secret that is missing: taken as "no token", it
        # would open the server to everybody.
        if not text:
            raise ValueError(f"{PREFIX}ADMIN_TOKEN is empty")
        return {text: p.Token.ADMIN}


def misspelt(variables: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Find variables with the server's prefix that are no settings.

    Yields each with the nearest setting, or "".
    """
    # `extra="ignore"` drops them silently, and a misspelt limit would be no limit.
    known = [name.upper() for name in (*ServerSettings.model_fields, *CLIENT_VARIABLES)]
    for variable in sorted(variables):
        name = variable.removeprefix(PREFIX)
        if name != variable and name not in known:
            yield (
                variable,
                next((PREFIX + near for near in difflib.get_close_matches(name, known, n=1)), ""),
            )
