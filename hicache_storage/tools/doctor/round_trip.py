"""Round trip of pages through a storage, under an identity of the doctor's own."""

from __future__ import annotations

import logging
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from hicache_storage.layers import StorageOptions, innermost
from hicache_storage.objects import ObjectStorage
from hicache_storage.plugins import config_model, create_storage, registry
from hicache_storage.spec import (
    ConfigError,
    DriverError,
    HiCacheError,
    StorageIdentity,
    StorageUnavailableError,
)
from hicache_storage.tools.bench.client import (
    PAGE_SIZE,
    BenchWorkload,
    Client,
    WrongAnswerError,
    make_pool,
)
from hicache_storage.tools.bench.results import Operation
from hicache_storage.tools.doctor.finding import fail, ok, warn
from hicache_storage.tools.options import trial_options

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from hicache_storage.hookspecs import DriverSpec
    from hicache_storage.spec import HiCacheStorage
    from hicache_storage.tools.doctor.finding import DoctorTarget, Finding

CLEAN_UP: Final = (
    "nothing, it is empty; the next run removes it (`hicache metadata scopes delete` does, too)"
)
LEFTOVER_SECONDS: Final = 1.0
"""Time to remove the namespace of an earlier run, in seconds.

It is unused, or another run uses it meanwhile.
"""
QUARANTINE_SECONDS: Final = 10.0
"""Time to remove the namespace of this run; longer than the default quarantine of deleted pages."""
PAGES, PAGE_BYTES = 4, 8192
MODELS: Final = ("hicache-doctor", "hicache-doctor-2")
"""Always the same: some stores keep a record of each, which would grow with every run."""
FIXES: Final = (
    ("there is no directory", "mount the file system that belongs there, or make the directory"),
    ("Connection refused", "start the server, open the firewall, or correct its address"),
    ("Name or service not known", "correct the server's name, or let it be resolved"),
    ("CERTIFICATE_VERIFY_FAILED", "name the authority of its certificate (hf3fs: metadata_ca)"),
    ("WRONG_VERSION_NUMBER", "write http://: the server speaks no TLS on this port"),
    ("closed connection without response", "write https://, if the server speaks TLS on this port"),
    ("(401 ", "give a token that the server knows, by its option or variable"),
    ("(403 ", "give a token with the right that is missing"),
    ("Permission denied", "let this user read and write there: chown, chmod, or another user"),
)
"""Remedies by a part of the error."""


def check_round_trip(target: DoctorTarget) -> Iterator[Finding]:
    """Open a storage, set, find, get and remove pages, and close it.

    Its health is queried as well. Nothing is said of a driver that cannot be loaded, which
    `check_drivers` finds.
    """
    try:
        spec = registry().get(target.driver or "")
        config_model(spec)
    except DriverError:
        return
    options = target.options or trial_options(spec, target.throwaway)
    if options is None:
        needs = ", ".join(f"-c {name}=..." for name in spec.trial_config)
        detail = "none given, and a throwaway store needs a server: it was not opened"
        yield warn(f"{spec.name}: options", detail, needs)
        return
    check = f"{spec.name}: round trip"
    with _logged_warnings() as messages:
        try:
            yield from _examine(check, spec, options, target)
        except ConfigError as error:
            fix = f"`hicache drivers {spec.name}` lists the options; -c key=value"
            yield fail(f"{spec.name}: options", str(error), fix)
        except DriverError as error:
            detail = f"cannot be constructed: {error}"
            yield fail(check, detail, "correct the driver or its options")
        except StorageUnavailableError as error:
            detail = f"cannot be opened: {error}"
            fixes = (fix for part, fix in FIXES if part in detail)
            yield fail(check, detail, next(fixes, "start the store, or correct the options"))
        except WrongAnswerError as error:
            log = f" ({messages[0]})" if messages else ""
            fix = f"`hicache conformance run {spec.name}` finds the rule that it breaks, unless the store is at fault"
            yield fail(check, f"{error}{log}", fix)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's driver may raise anything
            fix = f"a fault of the driver: `hicache conformance run {spec.name}` finds the rule that it breaks"
            yield fail(check, f"raises {type(error).__name__}: {error}", fix)
        else:
            for message in dict.fromkeys(messages):
                yield warn(check, message, "the message, logged by the driver, says what to do")


def _examine(
    check: str, spec: DriverSpec, options: Mapping[str, object], target: DoctorTarget
) -> Iterator[Finding]:
    storage, other = (
        create_storage(
            spec.name,
            _identity(model),
            options,
            # Without a circuit breaker, which would answer misses for the calls that are to be
            # examined.
            options=StorageOptions(deadline_seconds=target.deadline_seconds, breaker_threshold=0),
        )
        for model in MODELS
    )
    try:
        exceeds = storage.capabilities.exceeding(spec.capabilities)
        if exceeds:
            detail = f"this instance promises more than its driver declares: {', '.join(exceeds)}"
            yield fail(check, detail, "declare it in the DriverSpec")
        storage.open()
        health = storage.health()
        if not (health.ok and health.writable):
            detail = f"opened, and health() answers: {health.detail or 'not ok'}"
            yield fail(check, detail, "start or repair the store")
            return
        if storage.capabilities.deletes or not target.options:
            # Into a store of the operator only if the pages can be removed one by one.
            if health.detail:
                yield ok(check, f"opened and healthy: {health.detail}")
            yield from _round_trip(check, storage, other, target)
        else:
            detail = "opened and healthy; no page was stored, because the driver could not remove exactly that one (deletes)"
            yield warn(check, detail, f"`hicache conformance run {spec.name}` on a throwaway store")
    finally:
        other.close()
        storage.close()


def _round_trip(
    check: str, storage: HiCacheStorage, other: HiCacheStorage, target: DoctorTarget
) -> Iterator[Finding]:
    workload = BenchWorkload(PAGE_BYTES, clients=1, batch_pages=PAGES)
    pool = make_pool(workload)
    storage.register_mem_host_pool_v2(pool, "kv")
    storage.on_host_pools_registered()
    client = Client(storage, pool, workload, run=secrets.token_hex(8), number=0)
    # The namespace of an earlier run may have been created with other options, which conflict with
    # these.
    _remove_namespaces(LEFTOVER_SECONDS, storage)
    client.prepare(range(1))
    keys = client.keys[0]
    try:
        milliseconds = [
            f"{operation} {client.run(operation, range(1)).seconds[0] * 1e3:.1f} ms"
            for operation in Operation
        ]
        # Written by one model, found by another: its bytes would be served as this one's.
        other.register_mem_host_pool_v2(pool, "kv")
        other.on_host_pools_registered()
        shared = other.batch_exists_v2(keys).kv_hit_pages
    finally:
        client.remove()
        # One by one: the hit of a chain ends at its first missing page.
        left = sum(storage.batch_exists_v2([key]).kv_hit_pages for key in keys)
    yield ok(check, f"{PAGES} pages of {PAGE_BYTES} bytes: {', '.join(milliseconds)}")
    if shared:
        detail = f"a storage of another model finds {shared} of the pages"
        fix = "the driver has to keep identities apart (rule ID-1), by the name of the namespace"
        yield fail(check, detail, fix)
    if left and target.options:
        detail = f"{left} pages are still there after delete()"
        yield warn(check, detail, f"`hicache conformance run {storage.get_stats().driver}`")
    elif target.options and not _remove_namespaces(QUARANTINE_SECONDS, storage, other):
        detail = "the namespaces of this run are still in the store: their slots are not free yet"
        yield warn(check, detail, CLEAN_UP)
    if not storage.get_stats().verifies_checksums:
        detail = "checksums are not verified: damage would be served as a hit"
        yield warn(check, detail, "leave verify_checksums on")


def _remove_namespaces(seconds: float, *storages: HiCacheStorage) -> bool:
    """Remove the empty namespaces, and return True if they are removed."""
    drivers = [driver for driver in map(innermost, storages) if isinstance(driver, ObjectStorage)]
    try:
        return not drivers or drivers[0].remove_pools(seconds, *drivers[1:])
    except (HiCacheError, OSError):
        return False


def _identity(model: str) -> StorageIdentity:
    return StorageIdentity(model=model, kv_dtype="uint8", page_size=PAGE_SIZE, layout="page_first")


@contextmanager
def _logged_warnings() -> Generator[list[str]]:
    """Collect logged warnings: a fault of the store is a miss, whose reason is in the log only."""
    messages = list[str]()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    # The root logger: a driver of another package has a logger of its own.
    listener, root = Listener(logging.WARNING), logging.getLogger()
    root.addHandler(listener)
    try:
        yield messages
    finally:
        root.removeHandler(listener)
