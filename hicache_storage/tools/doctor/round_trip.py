"""Round trip of pages through a storage, under an identity of the doctor's own."""

from __future__ import annotations

import logging
import secrets
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hicache_storage.layers import StorageOptions, innermost
from hicache_storage.objects import ObjectStorage
from hicache_storage.plugins import config_model, create_storage, registry
from hicache_storage.spec import (
    ConfigError,
    DriverError,
    HiCacheError,
    PoolTransfer,
    StorageIdentity,
    StorageUnavailableError,
    parse_config,
)
from hicache_storage.tools.doctor.finding import fail, ok, warn
from hicache_storage.tools.options import redacted, trial_options

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from hicache_storage.hookspecs import DriverSpec
    from hicache_storage.pools import PagedHostPool
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
PAGES: Final = 4
PAGE_SIZE: Final = 16
LAYERS, HEADS, HEAD_DIM = 2, 2, 64


class UnusableOptionsError(Exception):
    """The driver cannot be opened with the options at hand; `finding` has the reason."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.detail)
        self.finding = finding


class _RoundTripError(Exception):
    """A step of the round trip has failed."""


def usable_options(target: DoctorTarget) -> dict[str, object]:
    """Return the target's options with their defaults, or those of a throwaway store.

    Raises:
        UnusableOptionsError: the driver refuses its options or is unknown, or a throwaway store
            would need servers.
    """
    check = f"{target.driver}: options"
    try:
        spec = registry().get(target.driver or "")
        model = config_model(spec)
        chosen = target.options or trial_options(spec, target.throwaway)
        if chosen is None:
            needs = ", ".join(f"-c {name}=..." for name in spec.trial_config)
            raise UnusableOptionsError(
                warn(
                    check,
                    "none given, and a throwaway store needs a server: it was not opened",
                    needs,
                )
            )
        config = parse_config(model, chosen)
    except ConfigError as error:
        raise UnusableOptionsError(
            fail(
                check,
                str(error),
                f"`hicache drivers {target.driver}` lists the options; -c key=value",
            )
        ) from error
    except DriverError as error:
        raise UnusableOptionsError(fail(check, str(error), "see above")) from error
    return {name: getattr(config, name) for name in model.__struct_fields__}


def check_options(target: DoctorTarget) -> Iterator[Finding]:
    """Check that the driver accepts the options."""
    check = f"{target.driver}: options"
    try:
        usable_options(target)
    except UnusableOptionsError as error:
        yield error.finding
        return
    given = ", ".join(f"{name}={value}" for name, value in redacted(target.options).items())
    yield ok(check, given or "none given; a throwaway store was examined")


def check_round_trip(target: DoctorTarget) -> Iterator[Finding]:
    """Open a storage, set, find, get and remove pages, and close it.

    Its health is queried as well.
    """
    check = f"{target.driver}: round trip"
    try:
        usable_options(target)
    except UnusableOptionsError:
        return
    spec = registry().get(target.driver or "")
    with _logged_warnings() as messages:
        try:
            yield from _examine(check, spec, target)
        except DriverError as error:
            yield fail(
                check, f"cannot be constructed: {error}", "correct the driver or its options"
            )
        except StorageUnavailableError as error:
            yield fail(
                check, f"cannot be opened: {error}", "start the store, or correct the options"
            )
        except _RoundTripError as error:
            log = f" ({messages[0]})" if messages else ""
            fix = f"`hicache conformance run {spec.name}` finds the rule that it breaks, unless the store is at fault"
            yield fail(check, f"{error}{log}", fix)
        except HiCacheError as error:
            yield fail(
                check,
                f"{type(error).__name__}: {error}",
                f"`hicache conformance run {spec.name}` finds the rule that it breaks",
            )
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's driver may raise anything
            yield fail(
                check,
                f"raises {type(error).__name__}: {error}",
                "a fault of the driver: no call may raise it",
            )
        else:
            for message in dict.fromkeys(messages):
                yield warn(check, message, "the message, logged by the driver, says what to do")


def _examine(check: str, spec: DriverSpec, target: DoctorTarget) -> Iterator[Finding]:
    options = target.options or trial_options(spec, target.throwaway) or {}
    storage = create_storage(
        spec.name,
        _identity(),
        options,
        # Without a circuit breaker, which would answer misses for the calls that are to be
        # examined.
        options=StorageOptions(deadline_seconds=target.deadline_seconds, breaker_threshold=0),
    )
    try:
        exceeds = storage.capabilities.exceeding(spec.capabilities)
        if exceeds:
            yield fail(
                check,
                f"this instance promises more than its driver declares: {', '.join(exceeds)}",
                "declare it in the DriverSpec",
            )
        storage.open()
        health = storage.health()
        if not (health.ok and health.writable):
            yield fail(
                check,
                f"opened, and health() answers: {health.detail or 'not ok'}",
                "start or repair the store",
            )
            return
        if storage.capabilities.deletes or not target.options:
            # Into a store of the operator only if the pages can be removed one by one.
            if health.detail:
                yield ok(check, f"opened and healthy: {health.detail}")
            yield from _round_trip(check, storage, target)
        else:
            detail = "opened and healthy; no page was stored, because the driver could not remove exactly that one (deletes)"
            yield warn(check, detail, f"`hicache conformance run {spec.name}` on a throwaway store")
    finally:
        storage.close()


def _round_trip(check: str, storage: HiCacheStorage, target: DoctorTarget) -> Iterator[Finding]:
    trip = _RoundTrip.prepare(storage)
    # The namespace of an earlier run may have been created with other options, which conflict with
    # these.
    trip.remove_namespace(LEFTOVER_SECONDS)
    try:
        milliseconds = [f"{name} {trip.time(step) * 1e3:.1f} ms" for name, step in trip.steps()]
    finally:
        left = trip.remove()
    yield ok(
        check, f"{PAGES} pages of {trip.pool.geometry.page_bytes} bytes: {', '.join(milliseconds)}"
    )
    if target.options and not left and not trip.remove_namespace(QUARANTINE_SECONDS):
        yield warn(
            check,
            "the namespace of this run is still in the store: its slots are not free yet",
            CLEAN_UP,
        )
    if left and target.options:
        yield warn(
            check,
            f"{left} pages are still there after delete()",
            f"`hicache conformance run {storage.get_stats().driver}`",
        )
    if not storage.get_stats().verifies_checksums:
        yield warn(
            check,
            "checksums are not verified: damage would be served as a hit",
            "leave verify_checksums on",
        )


@dataclass(frozen=True, slots=True)
class _RoundTrip:
    """Pages to set and get, and the steps."""

    storage: HiCacheStorage
    pool: PagedHostPool
    keys: list[str]

    @classmethod
    def prepare(cls, storage: HiCacheStorage) -> _RoundTrip:
        import torch

        from hicache_storage.pools import AttentionGeometry, PagedHostPool

        pool = PagedHostPool(
            AttentionGeometry(
                layers=range(LAYERS), head_num=HEADS, head_dim=HEAD_DIM, dtype=torch.uint8
            ),
            size=2 * PAGES * PAGE_SIZE,
            page_size=PAGE_SIZE,
            pin_memory=False,
        )
        for buffer in pool.buffers:
            buffer.random_(0, 256)
        storage.register_mem_host_pool_v2(pool, "kv")
        storage.on_host_pools_registered()
        return cls(storage, pool, [secrets.token_hex(32) for _ in range(PAGES)])

    def steps(self) -> list[tuple[str, Callable[[], None]]]:
        return [("set", self.store), ("exists", self.find), ("get", self.load)]

    def time(self, step: Callable[[], None]) -> float:
        started = time.perf_counter()
        step()
        return time.perf_counter() - started

    def store(self) -> None:
        answer = self.storage.batch_set_v2([self._transfer(0)])
        if answer != {"kv": [True] * PAGES}:
            raise _RoundTripError(f"a set of {PAGES} pages answered {dict(answer)}")

    def find(self) -> None:
        found = self.storage.batch_exists_v2(self.keys).kv_hit_pages
        if found != PAGES:
            raise _RoundTripError(f"{PAGES} pages were stored, and exists finds {found}")

    def load(self) -> None:
        answer = self.storage.batch_get_v2([self._transfer(PAGES)])
        if answer != {"kv": [True] * PAGES}:
            raise _RoundTripError(f"{PAGES} pages were stored, and a get answered {dict(answer)}")
        for page in range(PAGES):
            sent, came = (
                self.pool.page_buffers([first * PAGE_SIZE])[0] for first in (page, PAGES + page)
            )
            if list(map(bytes, sent)) != list(map(bytes, came)):
                raise _RoundTripError(f"page {page} was read with other bytes")

    def remove(self) -> int:
        """Delete the pages, and return the number of those that still exist."""
        if self.storage.capabilities.deletes:
            self.storage.delete(self.keys)
        # One by one: the hit of a chain ends at its first missing page.
        return sum(self.storage.batch_exists_v2([key]).kv_hit_pages for key in self.keys)

    def remove_namespace(self, seconds: float) -> bool:
        """Remove the empty namespace, and return True if it is removed."""
        driver = innermost(self.storage)
        if not isinstance(driver, ObjectStorage):
            return True
        try:
            return driver.remove_pools(seconds)
        except (HiCacheError, OSError):
            return False

    def _transfer(self, first_page: int) -> PoolTransfer:
        import torch

        slots = torch.arange(first_page * PAGE_SIZE, (first_page + PAGES) * PAGE_SIZE)
        return PoolTransfer("kv", slots, keys=self.keys)  # type: ignore[arg-type] # a plain string is converted


def _identity() -> StorageIdentity:
    # Always the same identity: some stores keep a record of each one, which would grow with every
    # run.
    return StorageIdentity(
        model="hicache-doctor", kv_dtype="uint8", page_size=PAGE_SIZE, layout="page_first"
    )


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
