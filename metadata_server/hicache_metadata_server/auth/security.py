"""Access control of one server: origins, tokens, rate limits, TLS, audit log, and their files."""

from __future__ import annotations

import ipaddress
import math
import socket
import time
from typing import TYPE_CHECKING, Final, Self

import structlog

from hicache_metadata_server.auth.audit_log import AuditLog
from hicache_metadata_server.auth.tls import ServerTls
from hicache_metadata_server.auth.token_file import read_token_file, readable_by_all
from hicache_metadata_server.auth.tokens import Tokens
from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.core.tenants import TOO_MANY, TenantUsage, TokenBucket
from hicache_storage.observability import metric_defs as v
from hicache_storage.observability.prometheus import scalar, scalars

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from prometheus_client.core import Metric

    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.core.tenants import Caller, Quotas, Tenants
    from hicache_metadata_server.settings import ServerSettings

MIN_CHARACTERS: Final = 16
"""Characters of a token in the environment below which the log warns."""

_log = structlog.get_logger()
PRIVATE: Final = (".localhost", ".local", ".internal")
"""Top-level domains that nobody can register."""
OPTION: Final = "HICACHE_METADATA_ALLOWED_HOSTS"
MAX_CACHED_HOSTS: Final = 1024
_OWN_SITE: Final = (b"same-origin", b"none")
COMPLETIONS: Final = frozenset(("commit", "abort", "renew", "unpin", "confirm_write"))
"""Requests that complete an earlier one. Refusing them would waste the pages written in between, and
keep their slots leased."""


class Security:
    """Access control of one server; by default everything is permitted."""

    def __init__(
        self, service: MetadataService, tokens: Tokens | None = None, audit: AuditLog | None = None
    ) -> None:
        self._service = service
        self.tokens = tokens or Tokens()
        self.audit = audit or AuditLog()
        self.origin_policy = OriginPolicy()
        self.rates = RateLimiter(service.tenants)
        self.tls: ServerTls | None = None
        self.watched = list[WatchedFiles]()
        self._is_forced = False

    @classmethod
    def of(cls, settings: ServerSettings, service: MetadataService) -> Self:
        """Build access control from settings, and read all files.

        Raises:
            ValueError: a file or a setting is invalid.
            OSError: a file cannot be read.
        """
        made = cls(service, Tokens(settings.tokens()))
        made._open(settings)
        return made

    def check_browser(self, headers: Mapping[bytes, bytes]) -> None:
        """Check that no page of another site has sent a request.

        Raises:
            RequestError: 403; another site's page has sent it, or may have.
        """
        # Where there are tokens, another site's page has none, and a browser adds none by itself.
        if not self.tokens:
            self.origin_policy.check(headers)

    def request_reload(self) -> None:
        """Read all files again at the next `reload`.

        Safe to call in a signal handler.
        """
        # Only a flag: the handler may interrupt any line of the event loop.
        self._is_forced = True

    def reload(self) -> None:
        """Read changed files again; called once a second."""
        # Cleared before the work, so that a signal that arrives meanwhile is not lost.
        force, self._is_forced = self._is_forced, False
        for one in self.watched:
            if one.reload(force=force):
                result = "failed" if one.problem else "done"
                self.audit.write("reload", what=one.name, result=result, reason=one.problem)

    @property
    def tls_context(self) -> ssl.SSLContext | None:
        """Context of the listening socket; None for plain HTTP."""
        return self.tls.context if self.tls else None

    def families(self) -> Iterator[Metric]:
        """Metric families of tokens, tenants and files."""
        yield from self._file_families()
        yield from self._tenant_families()
        tokens = scalars(v.TOKENS)
        for state, count in self.tokens.counts().items():
            tokens.add_metric([state], count)
        yield tokens
        if (expiry := self.tokens.next_expiry()) is not None:
            yield scalar(v.NEXT_TOKEN_EXPIRY, expiry)

    def _file_families(self) -> Iterator[Metric]:
        failing, loads = scalars(v.RELOAD_FAILING), scalars(v.RELOADS)
        for one in self.watched:
            failing.add_metric([one.name], bool(one.problem))
            loads.add_metric([one.name], one.loads)
        yield failing
        yield loads

    def _tenant_families(self) -> Iterator[Metric]:
        held, most = scalars(v.TENANT_HOLDS), scalars(v.TENANT_QUOTA)
        quotas = self._service.tenants.quotas
        tenants = {scope.tenant for scope in self._service.scopes.values()}
        # Also tenants without a scope that have a quota, and those whose quota was removed.
        for tenant in sorted({*tenants, *quotas.by_tenant} - {""}):
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
        self.origin_policy = OriginPolicy(settings.allowed_hosts.split(","), settings.host)
        if (file := settings.token_file) is not None:
            self.watched.append(WatchedFiles("tokens", [file], lambda: self._load_tokens(file)))
        if (quotas := settings.tenants_file) is not None:
            self.watched.append(
                WatchedFiles("tenants", [quotas], lambda: self._load_quotas(quotas))
            )
        if settings.tls_certificate is not None and settings.tls_key is not None:
            self.tls = ServerTls(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
            self.watched.append(WatchedFiles("certificates", self.tls.files, self.tls.reload))
        # At the start a bad file is an error; later reloads keep the last good content instead.
        for one in self.watched:
            one.load()
        # An empty token file locks everybody out, which at a start is a mistake. When it is emptied
        # later, that revokes all tokens.
        if settings.token_file is not None and not any(self.tokens.counts().values()):
            raise ValueError(f"{settings.token_file} holds no token")
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
        for token in settings.tokens():
            if len(token) < MIN_CHARACTERS:
                _log.warning(
                    "short_token",
                    variable="HICACHE_METADATA_ADMIN_TOKEN",
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


class OriginPolicy:
    """Checks against cross-site requests and DNS rebinding, for servers without tokens.

    A page of any site can make a browser send requests to this machine. A cross-site request has
    the page's site in `Origin`, or says so in `Sec-Fetch-Site`. With DNS rebinding, the page's own
    host name resolves to this machine, so that the browser sends no cross-site headers; its name is
    in `Host`.

    Accepted in `Host` are addresses, names that nobody outside can register (without a dot, or
    ending in one of `PRIVATE`), the machine's own name, `host`, and the names in `allowed`. Accepted
    in `Origin` is the site that the request was sent to, and the hosts in `allowed`.
    """

    def __init__(self, allowed: Iterable[str] = (), host: str = "") -> None:
        self._allowed = {name.strip().lower() for name in allowed if name.strip()}
        self._names = self._allowed | {socket.gethostname().lower(), host.lower()}
        # Clients send the same few values: each of them is parsed once.
        self._accepted = set[bytes]()
        """Values of `Host` that were accepted before."""

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Check that no page of another site has sent a request.

        Raises:
            RequestError: 403; another site's page has sent it, or may have.
        """
        host = headers.get(b"host", b"")
        if host not in self._accepted:
            self._check_host(host)
        # `Origin` decides where there is one: old browsers send no `Sec-Fetch-Site`, and programs
        # send neither.
        origin = headers.get(b"origin")
        if origin is not None:
            self._check_origin(origin, host)
        elif headers.get(b"sec-fetch-site", b"none") not in _OWN_SITE:
            raise _refused(
                "a page of another site has sent this request, and this server has no tokens",
                "Sec-Fetch-Site",
            )

    def _check_host(self, host: bytes) -> None:
        name = _name_of(host)
        if not (self._is_private(name) or name in self._names):
            message = (
                f"this server has no tokens, and does not know itself as {name[:100]!r}: name it "
                f"in {OPTION}, or give the server tokens"
            )
            raise _refused(message, "Host")
        # Any address is accepted, so that a client could make up values without end.
        if len(self._accepted) < MAX_CACHED_HOSTS:
            self._accepted.add(host)

    def _check_origin(self, origin: bytes, host: bytes) -> None:
        # `null`, the origin of sandboxed frames and local files, has no `://` and is refused.
        _, _, site = origin.lower().partition(b"://")
        # Against the port as well: another server on this machine is another site.
        if not site or (site != host.lower() and _name_of(site) not in self._allowed):
            raise _refused(
                f"a page of {origin[:100].decode('latin-1')!r} has sent this request, and this "
                f"server has no tokens",
                "Origin",
            )

    def _is_private(self, name: str) -> bool:
        if "." not in name and ":" not in name:
            return True
        return name.endswith(PRIVATE) or _is_address(name)


def _name_of(host_and_port: bytes) -> str:
    """Host of `host:port`, without the brackets of an IPv6 address."""
    text = host_and_port.decode("latin-1").strip().lower()
    if text.startswith("["):
        address, _, rest = text[1:].partition("]")
        return address if not rest or rest.startswith(":") else text
    # A dot at the end is legal in DNS and names the same host.
    return text.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refused(message: str, field: str) -> RequestError:
    return RequestError(403, "forbidden", message, field)


class RateLimiter:
    """Token buckets of the tenants that have a limit.

    Each server process counts for itself. Used from one event loop.
    """

    def __init__(self, tenants: Tenants, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tenants = tenants
        self._clock = clock
        self._quotas: Quotas = tenants.quotas
        self._buckets: dict[str, TokenBucket | None] = {}
        self.throttled: dict[str, int] = {}
        """Number of refused requests by tenant."""

    def admit(self, caller: Caller, route: str) -> None:
        """Count a request of a tenant.

        Raises:
            RequestError: 429, with the seconds to wait.
        """
        tenant = caller.tenant
        if not tenant:
            return
        # A reload of the tenants file replaces the quotas as a whole, and may have changed any rate.
        if self._quotas is not self._tenants.quotas:
            self._quotas = self._tenants.quotas
            self._buckets = {}
        bucket = self._buckets.get(tenant) if tenant in self._buckets else self._new_bucket(tenant)
        if bucket is None:
            return
        # Completions may overdraw the bucket by a burst: they are counted, so that they are no way
        # around the limit, and the tenant's next new request waits for them.
        min_level = -bucket.burst if route.rpartition("/")[2] in COMPLETIONS else 0.0
        seconds = bucket.take(self._clock(), min_level)
        if seconds:
            self.throttled[tenant] = self.throttled.get(tenant, 0) + 1
            message = f"tenant {tenant!r} may send {bucket.rate:g} requests a second"
            raise RequestError(
                429, TOO_MANY, message, "Authorization", retry_seconds=math.ceil(seconds)
            )

    def _new_bucket(self, tenant: str) -> TokenBucket | None:
        quota = self._quotas.of(tenant)
        rate = quota.requests_per_second
        # Also None is kept: tenants without a limit need no look at the quotas either.
        bucket = (
            None
            if rate is None
            else TokenBucket(rate, max(1.0, quota.burst or rate), self._clock())
        )
        self._buckets[tenant] = bucket
        return bucket


class WatchedFiles:
    """Files that are loaded together, and again when any of them changes.

    By polling: inotify does not report changes that another client of a network file system makes.
    If loading fails, the last good content stays in use.

    Args:
        name: in logs and metrics.
        files: the files.
        load: reads them; raises ValueError or OSError, and then has changed nothing.
    """

    def __init__(self, name: str, files: Sequence[Path], load: Callable[[], None]) -> None:
        self.name = name
        self._files = files
        self._load = load
        self._loaded: list[tuple[int, int, int] | None] = []
        self.loads = 0
        self.problem = ""
        """Error of the last attempt, or ""."""

    def load(self) -> None:
        """Load the files.

        Raises:
            ValueError: the content is invalid.
            OSError: a file cannot be read.
        """
        # Before loading: a file that changes meanwhile has another signature at the next poll. Also
        # if loading fails: the same bad file is not an error line every second.
        self._loaded = self._signature()
        self._load()
        self.loads += 1

    def reload(self, *, force: bool) -> bool:
        """Load the files again if they changed or `force` is set; True if it tried."""
        if not force and self._signature() == self._loaded:
            return False
        try:
            self.load()
        except (ValueError, OSError) as error:
            self.problem = str(error)
            _log.error("reload_failed", what=self.name, reason=self.problem)
        else:
            self.problem = ""
            _log.info("reloaded", what=self.name)
        return True

    def _signature(self) -> list[tuple[int, int, int] | None]:
        found = list[tuple[int, int, int] | None]()
        for file in self._files:
            try:
                status = file.stat()
                # The inode as well: a file moved into place may have the time and size of the old
                # one.
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
            # A missing file is a state like others: it may be replaced in two steps.
            except OSError:
                found.append(None)
        return found
