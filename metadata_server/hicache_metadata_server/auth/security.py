"""Access control of one server: tokens, rate limits, TLS and audit log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, Self

import structlog

from hicache_metadata_server.auth.audit_log import AuditLog
from hicache_metadata_server.auth.origins import OriginPolicy
from hicache_metadata_server.auth.rate_limits import RateLimiter
from hicache_metadata_server.auth.tls import ServerTls
from hicache_metadata_server.auth.token_file import read_token_file, readable_by_all
from hicache_metadata_server.auth.tokens import Tokens
from hicache_metadata_server.auth.watched_files import FileWatcher, WatchedFiles
from hicache_metadata_server.core.tenants import TenantUsage
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
"""Characters of a token in the environment below which the log warns."""

_log = structlog.get_logger()


class TenantScopes(Protocol):
    """The part of a service that access control needs."""

    tenants: Tenants

    def held_by(self, tenant: str) -> Iterable[ScopeGeometry]:
        """Return the geometry of each scope of a tenant."""
        ...


class Security:
    """Access control of one server; by default everything is permitted."""

    def __init__(
        self, service: TenantScopes, tokens: Tokens | None = None, audit: AuditLog | None = None
    ) -> None:
        self._service = service
        self.tokens = tokens or Tokens()
        self.audit = audit or AuditLog()
        self.origin_policy = OriginPolicy()
        self.rates = RateLimiter(service.tenants)
        self.tls: ServerTls | None = None
        self.file_watcher = FileWatcher([], self.audit)

    @classmethod
    def of(cls, settings: ServerSettings, service: TenantScopes) -> Self:
        """Build access control from settings, and read all files.

        Raises:
            ValueError: a file or a setting is invalid.
            OSError: a file cannot be read, or the audit file cannot be opened.
        """
        made = cls(service, Tokens(settings.tokens()), AuditLog(settings.audit_file))
        try:
            made._open(settings)
        except BaseException:
            made.audit.close()
            raise
        return made

    def check_browser(self, headers: Mapping[bytes, bytes]) -> None:
        """Check that no page of another site has sent a request.

        Raises:
            RequestError: 403; another site's page has sent it, or may have.
        """
        # Where there are tokens, another site's page has none, and a browser adds none by itself.
        if not self.tokens:
            self.origin_policy.check(headers)

    @property
    def tls_context(self) -> ssl.SSLContext | None:
        """Context of the listening socket; None for plain HTTP."""
        return self.tls.context if self.tls else None

    def close(self) -> None:
        """Close the audit file."""
        self.audit.close()

    def families(self) -> Iterator[Metric]:
        """Metric families of tokens, tenants, files, certificates and audit log."""
        yield from self._file_families()
        yield from self._tenant_families()
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

    def _file_families(self) -> Iterator[Metric]:
        failing, loads = scalars(v.RELOAD_FAILING), scalars(v.RELOADS)
        for one in self.file_watcher.watched:
            failing.add_metric([one.name], bool(one.problem))
            loads.add_metric([one.name], one.loads)
        yield failing
        yield loads

    def _tenant_families(self) -> Iterator[Metric]:
        held, most = scalars(v.TENANT_HOLDS), scalars(v.TENANT_QUOTA)
        tenants, quotas = self._service.tenants, self._service.tenants.quotas
        # Also tenants without a scope that have a quota, and those whose quota was removed.
        for tenant in sorted({*tenants.of_scope.values(), *quotas.by_tenant} - {""}):
            has, quota = TenantUsage.of(self._service.held_by(tenant)), quotas.of(tenant)
            for what in TenantUsage._fields:
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
        self.origin_policy = OriginPolicy([settings.host, *settings.allowed_hosts.split(",")])
        watched = list[WatchedFiles]()
        if (file := settings.token_file) is not None:
            watched.append(WatchedFiles("tokens", [file], lambda: self._load_tokens(file)))
        if (quotas := settings.tenants_file) is not None:
            watched.append(WatchedFiles("tenants", [quotas], lambda: self._load_quotas(quotas)))
        # At the start a bad file is an error; later reloads keep the last good content instead.
        for one in watched:
            one.load()
        # An empty token file locks everybody out, which at a start is a mistake. When it is emptied
        # later, that revokes all tokens.
        if settings.token_file is not None and not any(self.tokens.counts().values()):
            raise ValueError(f"{settings.token_file} holds no token")
        if settings.tls_certificate is not None and settings.tls_key is not None:
            self.tls = ServerTls(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
            # Not `load`: the constructor has read them.
            watched.append(WatchedFiles("certificates", self.tls.files, self.tls.reload))
        self.file_watcher = FileWatcher(watched, self.audit)
        self._warn(settings)

    def _load_tokens(self, file: Path) -> None:
        self.tokens.replace_records(read_token_file(file))

    def _load_quotas(self, file: Path) -> None:
        # Late: few servers have tenants, and the models of their file take time to build.
        from hicache_metadata_server.auth.tenants_file import read_tenants_file

        self._service.tenants.quotas = read_tenants_file(file)

    def _warn(self, settings: ServerSettings) -> None:
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
