"""The interface of fault injectors, those whose work another process does, and an active fault plan."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final

from hicache_conformance.model.fault_plan import Fault, FaultKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    from hicache_conformance.model.fault_plan import FaultPlan
    from hicache_storage.spec import HiCacheStorage


PATIENCE_SECONDS: Final = 30.0
"""How long a process may take to answer, or to end."""


class FaultInjector(ABC):
    """A place below a driver where operations can be made to fail.

    One plan at a time; healed before the next.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self.plans: list[FaultPlan] = []
        """Plans that were injected, each once, in their order; for the report of the case."""

    @property
    def tmp(self) -> Path | None:
        """The directory that `{tmp}` stands for with this injector.

        None where it does not matter.
        """
        return None

    @property
    def ports(self) -> Mapping[str, int]:
        """The ports that `{port:NAME}` stands for with this injector.

        Those of the servers themselves if empty.
        """
        return {}

    def renew(self) -> None:
        """Let `tmp` be an empty directory, behind a case that has failed."""
        return

    def attach(self, storage: HiCacheStorage) -> None:
        """Put the injector below a storage that was just constructed."""
        return

    def inject(self, plan: FaultPlan) -> None:
        """Activate a plan, and record it for the report."""
        if plan.faults and plan not in self.plans:
            self.plans.append(plan)
        self.apply(plan)

    @abstractmethod
    def apply(self, plan: FaultPlan) -> None:
        """Activate a plan."""

    @abstractmethod
    def heal(self) -> None:
        """End all faults, and release what hangs. Idempotent."""

    @abstractmethod
    def injected_count(self) -> int:
        """Count the requests of the present or last plan that a fault has hit."""

    def close(self) -> None:
        """Heal, and leave nothing behind."""
        self.heal()


class ProcessInjector(FaultInjector):
    """An injector whose process executes the calls, one after the other.

    The process ends with its connection to this one, and so with the suite.

    Args:
        main: runs there, with its end of the connection and the arguments; it obeys with `obey`.
    """

    def __init__(self, main: Callable[..., object], *arguments: object) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._pipe, theirs = multiprocessing.Pipe()
        # A new interpreter: forks of a process with threads may hang.
        self._process = multiprocessing.get_context("spawn").Process(
            target=_begin, args=(main, theirs, *arguments), daemon=True
        )
        with theirs:
            self._process.start()

    @property
    def alive(self) -> bool:
        """Return whether the process runs."""
        return self._process.is_alive()

    def apply(self, plan: FaultPlan) -> None:
        self.ask("apply", plan)

    def heal(self) -> None:
        self.ask("heal")

    def injected_count(self) -> int:
        return int(self.ask("count_injected"))

    def ask(self, name: str, *arguments: object) -> Any:
        """Call a method there; the answer.

        Raises:
            RuntimeError: the process has ended, or hangs.
        """
        # Calls come from several threads of a case, and an answer belongs to the call before it.
        with self._lock, contextlib.suppress(EOFError, OSError):
            self._pipe.send((name, arguments))
            if self._pipe.poll(PATIENCE_SECONDS):
                return self._pipe.recv()
        self._process.join(1.0)
        raise RuntimeError(
            f"the process of the injector {self.name!r} does not answer {name!r}; it ended with "
            f"{self._process.exitcode}"
        )

    def close(self) -> None:
        """Let the process end, which heals; idempotent."""
        self._pipe.close()
        self._process.join(PATIENCE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(PATIENCE_SECONDS)


def obey(pipe: Connection, target: object) -> None:
    """Execute calls on an object until the other side has gone."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            name, arguments = pipe.recv()
            pipe.send(getattr(target, name)(*arguments))


def _begin(main: Callable[..., object], pipe: Connection, *arguments: object) -> None:
    # Neither a Ctrl-C at the terminal nor the end of a run's session is for it: it ends by itself.
    os.setsid()
    main(pipe, *arguments)


MAX_HANG_SECONDS: Final = 60.0
"""A hang ends after this long even without `heal`, so that no process is stuck for good where the
suite was killed."""


class ActiveFaults:
    """Faults on some operations. Thread-safe."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._faults = tuple(faults)
        self._passed = [0] * len(self._faults)
        self._lock = threading.Lock()
        self._healed = threading.Event()
        self.injected_count = 0
        """Operations that a fault has hit."""

    def at(self, operation: str) -> list[Fault]:
        """Return the faults that hit the operation that begins now."""
        # Without the lock: most operations meet no fault, and a lock would make the threads of a
        # driver wait for each other.
        if not self._faults or self._healed.is_set():
            return []
        found: list[Fault] = []
        # Guards the counters. Two threads that read one number would both be the operation that a
        # fault of `count=1` hits.
        with self._lock:
            for index, fault in enumerate(self._faults):
                if fault.operations and operation not in fault.operations:
                    continue
                number, self._passed[index] = self._passed[index], self._passed[index] + 1
                if number >= fault.first and (
                    not fault.count or number < fault.first + fault.count
                ):
                    found.append(fault)
            self.injected_count += bool(found)
        return found

    def apply(self, faults: Iterable[Fault]) -> None:
        """Apply delays and hangs, and then errors.

        Raises:
            OSError: one of the faults is an error.
        """
        for fault in faults:
            if fault.kind is FaultKind.DELAY:
                self._healed.wait(fault.seconds)
            elif fault.kind is FaultKind.HANG:
                self._healed.wait(MAX_HANG_SECONDS)
        # Errors come after the delays, so that a plan of both is a call that takes long and fails,
        # as with a lost server.
        for fault in faults:
            if fault.kind is FaultKind.ERROR:
                raise failure(fault.error)

    def heal(self) -> None:
        """End the faults, and release the operations that hang."""
        self._healed.set()


def failure(name: str) -> OSError:
    """The error of this `errno`."""
    number: int = getattr(errno, name)
    return OSError(number, os.strerror(number))


def find_fault(faults: Iterable[Fault], kind: FaultKind) -> Fault | None:
    """Return the fault of a kind among those that hit an operation."""
    return next((fault for fault in faults if fault.kind is kind), None)


def flipped(content: bytes | bytearray | memoryview, place: float) -> bytes:
    """The bytes with one bit changed at a fraction of their length."""
    changed = bytearray(content)
    if changed:
        changed[min(int(place * len(changed)), len(changed) - 1)] ^= 1
    return bytes(changed)
