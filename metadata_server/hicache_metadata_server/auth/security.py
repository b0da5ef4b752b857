"""Access control of one server: tokens, origins, audit log, TLS, and the files of these."""

from __future__ import annotations

import ssl
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, Self

import structlog

from hicache_metadata_server import metric_defs as v
from hicache_metadata_server.auth.access import OriginPolicy, Tokens
from hicache_metadata_server.auth.files import (
    read_tenants_file,
    read_token_file,
    readable_by_all,
)
from hicache_metadata_server.core.limits import ANYBODY, Caller, TenantUsage
from hicache_metadata_server.logs import AUDIT
from hicache_storage.observability.prometheus import scalar, scalars

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from prometheus_client.core import Metric

    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.settings import ServerSettings

TEXT: Final = 200
"""Maximum characters of a text that a client has sent."""
NAMES: Final = 16
"""Maximum scope names in a line; beyond, the line has their number as well."""
BURST: Final = 10.0
"""Refusals of one host that are written one by one; after that, one a second, with the number of
those left out."""
MAX_HOSTS: Final = 1024
MIN_CHARACTERS: Final = 16
"""Characters of a token in the environment below which the log warns."""

_log = structlog.get_logger()


class Security:
    """Access control of one server; by default everything is permitted."""

    def __init__(
        self, service: MetadataService, tokens: Tokens | None = None, audit: AuditLog | None = None
    ) -> None:
        self._service = service
        self.tokens = tokens or Tokens()
        self.audit = audit or AuditLog()
        self.origin_policy = OriginPolicy(self.tokens)
        self.tls: ServerTls | None = None
        self.watched = list[WatchedFiles]()

    @classmethod
    def of(cls, settings: ServerSettings, service: MetadataService) -> Self:
        """Build access control from settings, and read all files.

        Raises:
            ValueError: a file or a setting is invalid.
            OSError: a file cannot be read.
        """
        made = cls(service, Tokens(settings.tokens()))
        tokens, watch = made.tokens, made.watched.append
        made.origin_policy = OriginPolicy(tokens, settings.allowed_hosts.split(","), settings.host)
        if (file := settings.token_file) is not None:
            watch(
                WatchedFiles(
                    "tokens", [file], lambda: tokens.replace_records(read_token_file(file))
                )
            )
        if (quotas := settings.tenants_file) is not None:
            watch(WatchedFiles("tenants", [quotas], lambda: made._load_quotas(quotas)))
        if settings.tls_certificate is not None and settings.tls_key is not None:
            made.tls = ServerTls(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
            watch(WatchedFiles("certificates", made.tls.files, made.tls.reload))
        # At the start a bad file is an error; later reloads keep the last good content instead.
        for one in made.watched:
            one.load()
        # An empty token file locks everybody out, which at a start is a mistake. When it is emptied
        # later, that revokes all tokens.
        if file is not None and not any(tokens.counts().values()):
            raise ValueError(f"{file} holds no token")
        made._warn(settings)
        return made

    def reload(self) -> None:
        """Read changed files again; called once a second."""
        for one in self.watched:
            if one.reload():
                result = "failed" if one.problem else "done"
                self.audit.write("reload", what=one.name, result=result, reason=one.problem)

    def families(self) -> Iterator[Metric]:
        """Metric families of tokens, tenants and files."""
        failing, loads = scalars(v.RELOAD_FAILING), scalars(v.RELOADS)
        for one in self.watched:
            failing.add_metric([one.name], bool(one.problem))
            loads.add_metric([one.name], one.loads)
        tokens = scalars(v.TOKENS)
        for state, count in self.tokens.counts().items():
            tokens.add_metric([state], count)
        if (expiry := self.tokens.next_expiry()) is not None:
            yield scalar(v.NEXT_TOKEN_EXPIRY, expiry)
        held, most = scalars(v.TENANT_HOLDS), scalars(v.TENANT_QUOTA)
        quotas = self._service.quotas
        tenants = {scope.tenant for scope in self._service.scopes.values()}
        # Also tenants without a scope that have a quota, and those whose quota was removed.
        for tenant in sorted({*tenants, *quotas.by_tenant} - {""}):
            has, quota = TenantUsage.of(self._service.held_by(tenant)), quotas.of(tenant)
            for what in TenantUsage._fields:
                held.add_metric([tenant, what], getattr(has, what))
                if getattr(quota, what) is not None:
                    most.add_metric([tenant, what], getattr(quota, what))
        yield from (failing, loads, held, most, tokens)

    def _load_quotas(self, file: Path) -> None:
        self._service.quotas = read_tenants_file(file)

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
        if settings.host in ("127.0.0.1", "::1", "localhost"):
            return
        if not self.tokens:
            consequence = "everybody who reaches the port may do everything"
            _log.warning("no_tokens", host=settings.host, consequence=consequence)
        elif self.tls is None:
            _log.warning("no_tls", host=settings.host, consequence="tokens travel in the clear")


class AuditLog:
    """Audit log, of the event loop; by default, lines go to the logger `AUDIT`."""

    def __init__(
        self,
        write: Callable[..., None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.write = write or structlog.get_logger(AUDIT).info
        self._clock = clock
        self._hosts: OrderedDict[str, tuple[float, float, int]] = OrderedDict()
        """By host how many refusals may be written one by one, as of which time, and those left out
        since the last one written."""

    def request(
        self,
        route: str,
        status: int,
        caller: Caller,
        peer: str,
        message: Any,
        names: Sequence[str],
    ) -> None:
        """Write an admin call, or one that empties scopes; bounded in size, without page keys."""
        fields: dict[str, Any] = {"scopes": list(names[:NAMES])} if names else {}
        if len(names) > NAMES:
            fields["scopes_in_all"] = len(names)
        if (enabled := getattr(message, "enabled", None)) is not None:
            fields["enabled"] = enabled
        self.write("request", **_caller_fields(caller, peer), route=route, **fields, status=status)

    def refused(self, route: str, status: int, code: str, caller: Caller | None, peer: str) -> None:
        """Write a refused request; of many by one host, a sample and their number."""
        # By host and not by port: each attempt may come from a connection of its own. Without a
        # limit, anybody who reaches the port could fill the disk.
        host, now = peer.rpartition(":")[0], self._clock()
        room, since, left_out = self._hosts.pop(host, (BURST, now, 0))
        room = min(BURST, room + now - since)
        is_written = room >= 1.0
        self._hosts[host] = room - is_written, now, 0 if is_written else left_out + 1
        # The least recently seen host goes: refusals from many addresses must not fill the memory.
        if len(self._hosts) > MAX_HOSTS:
            self._hosts.popitem(last=False)
        if is_written:
            more = {"not_written": left_out} if left_out else {}
            self.write(
                "refused",
                **_caller_fields(caller or ANYBODY, peer),
                route=route[:TEXT],
                status=status,
                code=code,
                **more,
            )


def _caller_fields(caller: Caller, peer: str) -> dict[str, str]:
    return {"token": caller.token, "tenant": caller.tenant, "peer": peer}


class WatchedFiles:
    """Files that are loaded together, and again when any of them changes.

    By polling: inotify does not report changes that another client of a network file system makes.
    `load` raises ValueError or OSError, and then has changed nothing: the last good content stays.
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

    def reload(self) -> bool:
        """Load the files again if they changed; True if it tried."""
        if self._signature() == self._loaded:
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
                # Of its status, not of its content: a corrected mode counts, and a copy may keep the
                # time of its original.
                found.append((status.st_ctime_ns, status.st_size, status.st_ino))
            # A missing file is a state like others: it may be replaced in two steps.
            except OSError:
                found.append(None)
        return found


class ServerTls:
    """TLS context of a listening socket, TLS 1.2 at least.

    New connections use the certificates that were read last. With `client_ca` clients need a
    certificate that one of these authorities has signed.

    Raises:
        ValueError: a file cannot be read or is invalid, or key and certificate do not match.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        self.files = [certificate, key, *([client_ca] if client_ca else [])]
        self._current = self.context = self._read()
        # A listening socket cannot be given another context. The callback is the one place where a
        # connection can: `ssl` calls it in every handshake.
        self.context.sni_callback = self._choose

    def reload(self) -> None:
        """Read the files again, for new connections.

        Raises:
            ValueError: a file cannot be read or is invalid; nothing has changed.
        """
        self._current = self._read()

    def _choose(
        self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext
    ) -> None:
        # `name` does not matter: it is None if the client names no server.
        connection.context = self._current

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        options = ("--tls-certificate", "--tls-key", "--tls-client-ca")
        for option, needed in zip(options, self.files, strict=False):
            try:
                needed.read_bytes()
            except OSError as error:
                # OpenSSL's own error does not name the file.
                raise ValueError(
                    f"{option}: {needed} cannot be read: {error.strerror or error}"
                ) from error
        file, key, *authorities = self.files
        try:
            context.load_cert_chain(file, key, _no_password)
            for file in authorities:
                context.load_verify_locations(file)
                context.verify_mode = ssl.CERT_REQUIRED
                # No session tickets: a resumed session skips the client's certificate, so that a
                # removed authority would stay trusted.
                context.options |= ssl.OP_NO_TICKET
                context.num_tickets = 0
        except ssl.SSLError as error:
            raise ValueError(f"{file} cannot be used: {error.reason or error}") from error
        return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; the server cannot ask for its password")
