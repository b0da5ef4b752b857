"""Run a server until it is told to end."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

import prometheus_client
import structlog
import uvicorn

from hicache_metadata_server.auth.security import Security
from hicache_metadata_server.core.clock import Clock
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.http.app import create_app
from hicache_metadata_server.http.fast_path import DirectProtocol
from hicache_metadata_server.logs import configure_logs
from hicache_metadata_server.settings import misspelt
from hicache_metadata_server.shared.address import is_shared, shown
from hicache_metadata_server.storage.store import MEMORY, check_store, open_store
from hicache_storage.observability import tracing

if TYPE_CHECKING:
    import ssl

    from hicache_metadata_server.http.asgi import Front
    from hicache_metadata_server.settings import ServerSettings
    from hicache_metadata_server.storage.store import Store

SWITCH_SECONDS: Final = 0.0005
"""The thread that writes the store waits no longer than this for the interpreter."""

FORGETS: Final = "a restart forgets all pages, and engines begin with an empty cache; --store sqlite:///FILE keeps them"
MMAP_THRESHOLD: Final = -3
"""As glibc's malloc.h numbers its options."""
LARGE_BYTES: Final = 1 << 20
NOT_STARTED: Final = 3
"""The exit status of a server that cannot listen."""

_log = structlog.get_logger()


def restored_service(store: Store, settings: ServerSettings, now: float) -> MetadataService:
    """A service as its store has kept it.

    Raises:
        StoreError: it cannot be read.
    """
    service = MetadataService(
        settings.limits,
        durability=store.durability,
        name=f"hicache-storage {_version()}",
        max_scopes=settings.max_scopes,
    )
    service.restore(store.recover(now), store.rows, now)
    return service


def check(settings: ServerSettings) -> None:
    """See that a server would start: the settings, the files that they name, and the store. The log
    tells what it would warn of.

    Raises:
        StoreError: the store could not be opened.
        ValueError: a setting is not as it must be.
        OSError: a file cannot be read.
    """
    _begin_log(settings)
    if is_shared(settings.store):
        from hicache_metadata_server.shared.assembly import check_store as check_shared_store

        check_shared_store(settings.store, settings.durability, settings.store_replicas)
    else:
        check_store(settings.store)
    Security.of(settings, MetadataService(settings.limits)).close()


def serve(settings: ServerSettings) -> None:
    """Serve until SIGTERM or SIGINT; requests that were accepted by then are answered.

    Raises:
        StoreError: the store cannot be opened, or another server has it.
        ValueError: a setting is not as it must be.
    """
    _begin_log(settings)
    if settings.traces:
        _trace()
    _keep_large_blocks_apart()
    app, security = _shared_app(settings) if is_shared(settings.store) else _app(settings)
    # Pages live for long and hold no circles: going through a million of them again and again finds
    # nothing.
    gc.collect()
    _give_back()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
    sys.setswitchinterval(SWITCH_SECONDS)
    # A series for each counter's birthday, which nobody asked for.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    signal.signal(signal.SIGHUP, lambda number, frame: security.reloads.ask())
    try:
        _run(app, settings, security.tls_context)
    finally:
        security.close()


def _begin_log(settings: ServerSettings) -> None:
    configure_logs(settings.log_level, settings.log_format)
    for variable, nearest in misspelt(os.environ):
        _log.warning("unknown_setting", variable=variable, nearest=nearest)
    if settings.store == MEMORY:
        _log.warning("no_store", store=settings.store, consequence=FORGETS)


def _app(settings: ServerSettings) -> tuple[Front, Security]:
    clock = Clock()
    begin = time.perf_counter()
    store = open_store(settings.store, settings.durability)
    try:
        service = restored_service(store, settings, clock())
        security = Security.of(settings, service)
    except BaseException:
        store.close()
        raise
    pages = sum(len(scope.recency) for scope in service.scopes.values())
    for problem in service.recovery_problems:
        _log.warning("left_out", problem=problem)
    _log.info(
        "started",
        store=settings.store,
        durability=str(store.durability),
        scopes=len(service.scopes),
        pages=pages,
        instance=service.about.instance,
        tokens=bool(security.tokens),
        tls=security.tls is not None,
        recovery_seconds=round(time.perf_counter() - begin, 3),
    )
    return create_app(
        service, store, security=security, clock=clock, slow_seconds=settings.slow_seconds
    ), security


def _shared_app(settings: ServerSettings) -> tuple[Front, Security]:
    """One server of several on one Redis."""
    from hicache_metadata_server.shared.assembly import check_store, shared_app, shared_service

    check_store(settings.store, settings.durability, settings.store_replicas)
    service = shared_service(
        settings.store,
        settings.limits,
        settings.durability,
        name=f"hicache-storage {_version()}",
        max_scopes=settings.max_scopes,
        replicas=settings.store_replicas,
    )
    security = Security.of(settings, service)
    _log.info(
        "started",
        store=shown(settings.store),
        durability=str(settings.durability),
        replicas=settings.store_replicas,
        instance=service.about.instance,
        tokens=bool(security.tokens),
        tls=security.tls is not None,
    )
    return shared_app(service, security=security, slow_seconds=settings.slow_seconds), security


def _run(app: Front, settings: ServerSettings, tls: ssl.SSLContext | None) -> None:
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=settings.shutdown_seconds,
        server_header=False,
        date_header=False,
        lifespan="on",
        http=DirectProtocol,
        ws="none",
        proxy_headers=False,
    )
    config.load()
    config.ssl = tls
    server = uvicorn.Server(config)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        sys.exit(NOT_STARTED)


def _trace() -> None:
    """Trace all requests. What was not sent by the end is sent then, by the application."""
    try:
        from hicache_storage.observability.otel import provider_from_environment
    except ImportError as error:
        raise ValueError(
            f"traces need more packages: pip install 'hicache-storage[otel]' ({error})"
        ) from error
    tracing.enable(provider_from_environment("hicache-metadata"))


def _version() -> str:
    try:
        return version("hicache-storage")
    except PackageNotFoundError:
        return "0"


def _keep_large_blocks_apart() -> None:
    """Let each large block have its own mapping, however many of them come and go.

    The columns of a scope grow for as long as the server runs. glibc lets blocks that often grow
    move into the common heap, where each move leaves a hole: a seventh of all memory with a million
    pages. Of another C library nothing is asked.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGE_BYTES)


def _give_back() -> None:
    """Give the kernel what was freed: what a start needed beside the pages themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
