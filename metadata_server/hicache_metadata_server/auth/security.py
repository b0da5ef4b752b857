"""What stands between a client and the service: tokens, rates, the audit log, and the files that
they come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, Self

import structlog

from hicache_metadata_server.auth.audit_log import Audit
from hicache_metadata_server.auth.origins import Origins
from hicache_metadata_server.auth.rate_limits import Rates
from hicache_metadata_server.auth.tls import ServerTls
from hicache_metadata_server.auth.token_file import read_token_file, readable_by_all
from hicache_metadata_server.auth.tokens import Tokens
from hicache_metadata_server.auth.watched_files import Reloads, Watched
from hicache_metadata_server.core.tenants import Holding
from hicache_storage.observability import metric_defs as v
from hicache_storage.observability.prometheus import scalar, scalars

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from prometheus_client.core import Metric

    from hicache_metadata_server.core.tenants import Tenants
    from hicache_metadata_server.protocol import ScopeGeometry
    from hicache_metadata_server.settings import ServerSettings

MIN_CHARACTERS: Final = 16
"""Of a token in the environment, below which it is complained about."""

_log = structlog.get_logger()


class Owned(Protocol):
    """What it asks of a service."""

    tenants: Tenants

    def held_by(self, tenant: str) -> Iterable[ScopeGeometry]:
        """The scopes of a tenant."""
        ...


class Security:
    """Of one server. Without arguments it asks nobody for anything, and writes its audit lines to
    the log."""

    def __init__(
        self, service: Owned, tokens: Tokens | None = None, audit: Audit | None = None
    ) -> None:
        self._service = service
        self.tokens = tokens or Tokens()
        self.audit = audit or Audit()
        self.origins = Origins()
        self.rates = Rates(service.tenants)
        self.tls: ServerTls | None = None
        self.reloads = Reloads([], self.audit)

    @classmethod
    def of(cls, settings: ServerSettings, service: Owned) -> Self:
        """As the settings say.

        Raises:
            ValueError: a file or a setting is not as it must be.
            OSError: a file cannot be read, or the audit file not be written.
        """
        made = cls(service, Tokens(settings.tokens()), Audit(settings.audit_file))
        try:
            made._open(settings)
        except BaseException:
            made.audit.close()
            raise
        return made

    def check_browser(self, headers: Mapping[bytes, bytes]) -> None:
        """See that no page of another site has sent a request: where there are tokens, it has none.

        Raises:
            RefusedError: one has, or may have.
        """
        if not self.tokens:
            self.origins.check(headers)

    @property
    def tls_context(self) -> ssl.SSLContext | None:
        """Of the listening socket; None for plain HTTP."""
        return self.tls.context if self.tls else None

    def close(self) -> None:
        """Let go of the audit file."""
        self.audit.close()

    def families(self) -> Iterator[Metric]:
        """Metrics."""
        yield from self._of_files()
        yield from self._of_tenants()
        tokens = scalars(v.TOKENS)
        for state, count in self.tokens.counts().items():
            tokens.add_metric([state], count)
        yield tokens
        if (expiry := self.tokens.next_expiry()) is not None:
            yield scalar(v.NEXT_TOKEN_EXPIRY, expiry)
        if self.tls is not None:
            expiries = scalars(v.CERTIFICATE_EXPIRY)
            for file, expiry in self.tls.expiries.items():
                expiries.add_metric([file], expiry)
            yield expiries
        yield scalar(v.AUDIT_FAILURES, self.audit.failures)

    def _of_files(self) -> Iterator[Metric]:
        failing, loads = scalars(v.RELOAD_FAILING), scalars(v.RELOADS)
        for one in self.reloads.watched:
            failing.add_metric([one.name], bool(one.problem))
            loads.add_metric([one.name], one.loads)
        yield failing
        yield loads

    def _of_tenants(self) -> Iterator[Metric]:
        held, most = scalars(v.TENANT_HOLDS), scalars(v.TENANT_QUOTA)
        tenants, quotas = self._service.tenants, self._service.tenants.quotas
        for tenant in sorted({*tenants.of_scope.values(), *quotas.by_tenant} - {""}):
            has, quota = Holding.of(self._service.held_by(tenant)), quotas.of(tenant)
            for what in Holding._fields:
                held.add_metric([tenant, what], getattr(has, what))
                if getattr(quota, what) is not None:
                    most.add_metric([tenant, what], getattr(quota, what))
        yield held
        yield most
        throttled = scalars(v.THROTTLED)
        for tenant, count in self.rates.throttled.items():
            throttled.add_metric([tenant], count)
        yield throttled

    def _open(self, settings: ServerSettings) -> None:
        self.origins = Origins([settings.host, *settings.allowed_hosts.split(",")])
        watched = list[Watched]()
        if (file := settings.token_file) is not None:
            watched.append(Watched("tokens", [file], lambda: self._take_tokens(file)))
        if (quotas := settings.tenants_file) is not None:
            watched.append(Watched("tenants", [quotas], lambda: self._take_quotas(quotas)))
        for one in watched:
            one.load()
        if settings.token_file is not None and not any(self.tokens.counts().values()):
            raise ValueError(f"{settings.token_file} holds no token")
        if settings.tls_certificate is not None and settings.tls_key is not None:
            self.tls = ServerTls(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
            watched.append(Watched("certificates", self.tls.files, self.tls.reload))
        self.reloads = Reloads(watched, self.audit)
        self._complain(settings)

    def _take_tokens(self, file: Path) -> None:
        self.tokens.take(read_token_file(file))

    def _take_quotas(self, file: Path) -> None:
        from hicache_metadata_server.auth.tenants_file import read_tenants_file

        self._service.tenants.quotas = read_tenants_file(file)

    def _complain(self, settings: ServerSettings) -> None:
        for file in (settings.token_file, settings.tls_key):
            if file is not None and readable_by_all(file):
                _log.warning("readable_by_all", file=str(file))
        short = [kind for token, kind in settings.tokens().items() if len(token) < MIN_CHARACTERS]
        for kind in short:
            _log.warning(
                "short_token",
                variable=f"HICACHE_METADATA_{kind.upper()}_TOKEN",
                min_characters=MIN_CHARACTERS,
            )
        if not self.tokens and settings.host not in ("127.0.0.1", "::1", "localhost"):
            _log.warning(
                "no_tokens",
                host=settings.host,
                consequence="everybody who reaches the port may do everything",
            )
        if (
            self.tokens
            and self.tls is None
            and settings.host not in ("127.0.0.1", "::1", "localhost")
        ):
            _log.warning("no_tls", host=settings.host, consequence="tokens travel in the clear")
