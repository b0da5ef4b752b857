"""The interface of fault injectors, and those whose work another process does."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
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
