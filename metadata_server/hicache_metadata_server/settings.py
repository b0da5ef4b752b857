"""What an operator can set: options of `hicache metadata serve`, or `HICACHE_METADATA_...` in the environment."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - pydantic reads the annotations
from typing import Annotated, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from hicache_metadata_server import protocol as p
from hicache_metadata_server.service.limits import DEFAULTS
from hicache_metadata_server.service.service import MOST_SCOPES

Positive = Annotated[float, Field(gt=0)]


class ServerSettings(BaseSettings):
    """A server. Tokens come from a file or from the environment, never from the command line, which everybody on the machine sees."""

    model_config = SettingsConfigDict(env_prefix="HICACHE_METADATA_", extra="ignore", frozen=True)

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 18000
    store: str = "memory:"
    durability: p.Durability = p.Durability.PROCESS
    token_file: Path | None = None
    read_token: SecretStr | None = None
    write_token: SecretStr | None = None
    admin_token: SecretStr | None = None
    body_bytes: Annotated[int, Field(ge=65_536)] = DEFAULTS.body_bytes
    keys: Annotated[int, Field(ge=384)] = DEFAULTS.keys
    """Of one request. 128 keys in each of 3 scopes fit into one request of every server."""
    scopes_in_request: Annotated[int, Field(ge=3)] = DEFAULTS.scopes
    most_scopes: Annotated[int, Field(ge=1)] = MOST_SCOPES
    key_bytes: Annotated[int, Field(ge=p.KEY_BYTES)] = DEFAULTS.key_bytes
    lease_seconds: Positive = DEFAULTS.lease_seconds
    least_lease_seconds: Positive = DEFAULTS.least_lease_seconds
    most_lease_seconds: Positive = DEFAULTS.most_lease_seconds
    most_pin_seconds: Positive = DEFAULTS.most_pin_seconds
    quarantine_seconds: Annotated[float, Field(ge=0)] = DEFAULTS.quarantine_seconds
    idempotency_seconds: Positive = DEFAULTS.idempotency_seconds
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tenants_file: Path | None = None
    audit_file: Path | None = None
    shutdown_seconds: Annotated[int, Field(ge=1)] = 20
    """How long requests that were accepted may take after a SIGTERM."""
    log_level: str = "info"
    log_format: Annotated[str, Field(pattern="^(json|console)$")] = "json"
    slow_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Requests that take so long are logged; 0 for none."""
    traces: bool = False
    """A span for each request, exported as OpenTelemetry's own variables say."""

    @model_validator(mode="after")
    def _see_order(self) -> Self:
        if not self.least_lease_seconds <= self.lease_seconds <= self.most_lease_seconds:
            raise ValueError("lease_seconds must lie between least_lease_seconds and most_lease_seconds")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("TLS needs a certificate and a key")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs a certificate of the server")
        return self

    @property
    def limits(self) -> p.Limits:
        """As clients are told them."""
        return p.Limits(
            body_bytes=self.body_bytes, keys=self.keys, scopes=self.scopes_in_request, key_bytes=self.key_bytes,
            lease_seconds=self.lease_seconds, least_lease_seconds=self.least_lease_seconds, most_lease_seconds=self.most_lease_seconds,
            most_pin_seconds=self.most_pin_seconds, quarantine_seconds=self.quarantine_seconds,
            idempotency_seconds=self.idempotency_seconds,
        )  # fmt: skip

    def tokens(self) -> dict[str, p.Token]:
        """Those from the environment, by their text.

        Raises:
            ValueError: one is empty, or given for two rights.
        """
        found: dict[str, p.Token] = {}
        for kind, secret in (
            (p.Token.READ, self.read_token),
            (p.Token.WRITE, self.write_token),
            (p.Token.ADMIN, self.admin_token),
        ):
            if secret is not None:
                text = secret.get_secret_value()
                if not text or text in found:
                    raise ValueError(f"the {kind} token is empty, or stands for something else already")
                found[text] = kind
        return found
