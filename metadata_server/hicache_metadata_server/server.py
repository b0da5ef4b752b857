"""Start-up of a metadata server: logs, store, access control, and uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import time
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import prometheus_client
import structlog
import uvicorn

from hicache_metadata_server.auth.security import Security
from hicache_metadata_server.core.changes import SteadyClock
from hicache_metadata_server.core.restore import keep_large_blocks_apart, trim_heap
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.http.app import create_app
from hicache_metadata_server.http.connections import (
    Connections,
    HttpConnection,
    max_connections,
    raise_descriptor_limit,
)
from hicache_metadata_server.logs import configure_logs
from hicache_metadata_server.settings import misspelt
from hicache_metadata_server.storage.sqlite import check_store, open_store
from hicache_metadata_server.storage.store import MEMORY, is_shared, redacted

if TYPE_CHECKING:
    from hicache_metadata_server.http.asgi import ProtocolApp
    from hicache_metadata_server.settings import ServerSettings
    from hicache_metadata_server.storage.store import MetadataStore

NAME: Final = f"hicache-storage {version('hicache-storage')}"
SWITCH_SECONDS: Final = 0.0005
"""Switch interval of the interpreter: bounds the wait of the thread that commits to the store."""

NO_STORE_CONSEQUENCE: Final = (
    "a restart forgets all pages, and engines begin with an empty cache; --store sqlite:///FILE "
    "keeps them"
)
SHUTDOWN_SECONDS: Final = 20
"""Time that requests which were accepted may take after a SIGTERM; systemd kills after 60 s, and
Kubernetes after 30."""
HAND_OVER_SECONDS: Final = 2.0
"""Longest time for which the end of a server waits until others have its scopes."""
NOT_STARTED: Final = 3
"""Exit status of a server that cannot listen."""

_log = structlog.get_logger()


def restored_service(store: MetadataStore, settings: ServerSettings, now: float) -> MetadataService:
    """Restore a service from its store, at a time in seconds since 1970.

    Raises:
        StoreError: the store cannot be read.
    """
    service = MetadataService(settings.limits, durability=store.durability, name=NAME)
    service.restore(store.recover(now), store.rows, now)
    return service


def check(settings: ServerSettings) -> list[tuple[str, str]]:
    """Check that a server would start: settings, files and store.

    Warnings go to the log.

    Returns:
        Variables of the environment that are no settings, each with the nearest one or "".

    Raises:
        StoreError: the store cannot be opened.
        ValueError: a setting is invalid.
        OSError: a file cannot be read.
    """
    _begin_log(settings)
    if is_shared(settings.store):
        from hicache_metadata_server.shared.connection import check_store as check_shared_store

        _advertised_url(settings)
        check_shared_store(settings.store, settings.durability, settings.store_replicas)
    else:
        check_store(settings.store)
    Security.of(settings, MetadataService(settings.limits))
    return list(misspelt(os.environ))


def serve(settings: ServerSettings) -> None:
    """Serve until SIGTERM or SIGINT; requests accepted by then are answered.

    Raises:
        StoreError: the store cannot be opened, or another server has it open.
        ValueError: a setting is invalid.
    """
    _begin_log(settings)
    raise_descriptor_limit()
    keep_large_blocks_apart()
    app = _shared_app(settings) if is_shared(settings.store) else _app(settings)
    # Pages live long and are in no reference cycles: a collection would go through millions of
    # objects, stop the event loop meanwhile, and free nothing. What a start leaves behind is freed
    # first, because frozen objects are never looked at again.
    gc.collect()
    trim_heap()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
    sys.setswitchinterval(SWITCH_SECONDS)
    # Otherwise each counter has a second series with the time of its creation.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    # By default it would end the server: others read their files again then, and this one does so by
    # itself.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    server = Server(app, settings)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        sys.exit(NOT_STARTED)


def _begin_log(settings: ServerSettings) -> None:
    configure_logs(settings.log_level, settings.log_format)
    for variable, nearest in misspelt(os.environ):
        _log.warning("unknown_setting", variable=variable, nearest=nearest)
    if settings.store == MEMORY:
        _log.warning("no_store", store=settings.store, consequence=NO_STORE_CONSEQUENCE)


def _app(settings: ServerSettings) -> ProtocolApp:
    clock = SteadyClock()
    begin = time.perf_counter()
    store = open_store(settings.store, settings.durability)
    try:
        service = restored_service(store, settings, clock())
        security = Security.of(settings, service)
    except BaseException:
        # It is locked: a caller that catches the error can open it again.
        store.close()
        raise
    pages = sum(len(scope.lru) for scope in service.scopes.values())
    for problem in service.recovery_problems:
        _log.warning("left_out", problem=problem)
    _log_start(
        settings,
        security,
        service,
        scopes=len(service.scopes),
        pages=pages,
        recovery_seconds=round(time.perf_counter() - begin, 3),
    )
    return create_app(service, store, security=security, clock=clock)


def _shared_app(settings: ServerSettings) -> ProtocolApp:
    """Application of one server of several on one Redis."""
    from hicache_metadata_server.shared.connection import check_store
    from hicache_metadata_server.shared.owned_scopes import owner_app

    url, replicas = _advertised_url(settings), settings.store_replicas
    check_store(settings.store, settings.durability, replicas)
    service = MetadataService(
        settings.limits, durability=settings.durability, name=NAME, shares_store=True
    )
    security = Security.of(settings, service)
    _log_start(settings, security, service, url=url, replicas=replicas)
    return owner_app(service, settings.store, url, replicas=replicas, security=security)


def _log_start(
    settings: ServerSettings, security: Security, service: MetadataService, **more: object
) -> None:
    _log.info(
        "started",
        store=redacted(settings.store) if is_shared(settings.store) else settings.store,
        durability=str(service.about.durability),
        instance=service.about.instance,
        tokens=bool(security.tokens),
        tls=security.tls is not None,
        **more,
    )


def _advertised_url(settings: ServerSettings) -> str:
    """Address at which clients reach this server; ValueError if its port is not known yet."""
    if settings.advertised_url:
        return settings.advertised_url.rstrip("/")
    if not settings.port:
        raise ValueError("advertised_url: needed with port 0, for the other servers on this Redis")
    host = settings.host if settings.host not in ("0.0.0.0", "::") else socket.getfqdn()
    scheme = "https" if settings.tls_certificate else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _config(app: ProtocolApp, settings: ServerSettings, connections: Connections) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        # None listens on both families; asyncio binds "::" for IPv6 alone.
        host=None if settings.host == "::" else settings.host,  # type: ignore[arg-type]  # create_server takes it
        port=settings.port,
        loop="uvloop",
        http=partial(HttpConnection, connections),  # type: ignore[arg-type]  # it is called, no more
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        server_header=False,
        date_header=False,
        # With "auto", uvicorn takes an error at the start for an application without a lifespan, and
        # serves all the same.
        lifespan="on",
        ws="none",
        # Any client could name another address in `X-Forwarded-For`, and the audit log would have
        # it.
        proxy_headers=False,
    )
    config.load()
    # uvicorn can only make a context from files, once; this one follows changes of the files.
    config.ssl = app.security.tls.context if app.security.tls else None
    return config


class Server(uvicorn.Server):
    """uvicorn's server, which hands over before it closes connections, and closes silent ones."""

    def __init__(self, app: ProtocolApp, settings: ServerSettings) -> None:
        self.connections = Connections(max_connections())
        super().__init__(_config(app, settings, self.connections))
        self._app = app

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._sweeping = asyncio.create_task(self.connections.sweep())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Meanwhile requests are answered: the clients learn where to go.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_SECONDS):
                await self._app.handlers.hand_over()
        self._sweeping.cancel()
        self.connections.is_stopping = True
        await super().shutdown(sockets)
