"""The injector `objects`: wraps the methods of an `ObjectStorage` driver."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hicache_conformance.harness.corruption import Forgery
from hicache_conformance.injectors.injector import (
    ActiveFaults,
    FaultInjector,
    failure,
    find_fault,
    flipped,
)
from hicache_conformance.model.fault_plan import Fault, FaultKind, FaultPlan
from hicache_storage.layers import innermost
from hicache_storage.objects import Call, ObjectStorage, ObjectWrite, WriteBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.spec import HiCacheStorage

    Ask = Callable[[Sequence[Any], Call], list[list[bool]]]
ItemsT = TypeVar("ItemsT")
AnswerT = TypeVar("AnswerT")


class DriverMethodInjector(FaultInjector):
    """Faults around the methods of an `ObjectStorage`; each call of one of them is a request.

    The pages that a driver has read are left as they are: the SDK alone would be judged by them.

    The sorts of operations are `exists`, `read`, `write`, `discard`, `remove`, which is
    `delete_objects` and `clear_namespaces`, and `removals`.
    """

    name: ClassVar[str] = "objects"

    def __init__(self) -> None:
        super().__init__()
        self._active = ActiveFaults()

    def attach(self, storage: HiCacheStorage) -> None:
        driver: Any = innermost(storage)
        if not isinstance(driver, ObjectStorage):
            return
        # On the instance, so that the class and its other instances stay as they are.
        replaced: dict[str, Callable[[Any, Call], object]] = {
            # An answer from memory would bypass the faults; declined, the call goes through the
            # method below.
            "objects_exist_cached": lambda _, __: None,
            "objects_exist": partial(self._change, "exists", driver.objects_exist),
            "read_objects_cached": lambda _, __: False,
            "read_objects": partial(self._move, "read", driver.read_objects),
            "write_objects": partial(self._move, "write", driver.write_objects),
            "discard_objects": partial(self._change, "discard", driver.discard_objects),
            "delete_objects": partial(self._change, "remove", driver.delete_objects),
            "clear_namespaces": partial(self._change, "remove", driver.clear_namespaces),
            "collect_removals": partial(self._change, "removals", driver.collect_removals),
        }
        for name, method in replaced.items():
            setattr(driver, name, method)

    def apply(self, plan: FaultPlan) -> None:
        self._active = ActiveFaults(plan.faults)

    def heal(self) -> None:
        self._active.heal()

    def injected_count(self) -> int:
        return self._active.injected_count

    def _begin(self, operation: str) -> list[Fault]:
        # Read once: `apply` may replace it while this call is delayed.
        active = self._active
        faults = active.at(operation)
        active.apply(faults)
        return faults

    def _move(
        self, operation: str, ask: Ask, batches: Sequence[Any], call: Call
    ) -> list[list[bool]]:
        faults = self._begin(operation)
        partial = find_fault(faults, FaultKind.PARTIAL)
        if partial is not None:
            return _without_one(batches, f"{operation}s", partial.place, ask, call)
        flip = find_fault(faults, FaultKind.BIT_FLIP)
        if operation == "write" and (flip or find_fault(faults, FaultKind.TORN_WRITE)):
            batches = [
                WriteBatch(batch.namespace, [_spoilt(write, flip) for write in batch.writes])
                for batch in batches
            ]
        if find_fault(faults, FaultKind.DUPLICATE):
            ask(batches, call)
        answer = ask(batches, call)
        _fail_afterwards(faults)
        return answer

    def _change(
        self, operation: str, ask: Callable[[ItemsT, Call], AnswerT], items: ItemsT, call: Call
    ) -> AnswerT:
        faults = self._begin(operation)
        answer = ask(items, call)
        _fail_afterwards(faults)
        return answer


def _fail_afterwards(faults: Sequence[Fault]) -> None:
    """Fail as the fault asks for that lets a call take effect first."""
    applied = find_fault(faults, FaultKind.APPLIED)
    if applied is not None:
        raise failure(applied.error or "EIO")


def _spoilt(write: ObjectWrite, flip: Fault | None) -> ObjectWrite:
    """The write with other bytes than its envelope says; half of them where no bit is flipped."""
    last = write.buffers[-1]
    changed = flipped(last, flip.place) if flip else bytes(last[: len(last) // 2])
    changed = changed.ljust(len(last), b"\0")
    return Forgery(write, [*write.buffers[:-1], memoryview(bytearray(changed))], write.envelope)


def _without_one(
    batches: Sequence[Any], items: str, place: float, ask: Ask, call: Call
) -> list[list[bool]]:
    """Ask for all pages but one, and answer False for that."""
    total = sum(len(getattr(batch, items)) for batch in batches)
    left_out, places = min(int(place * total), total - 1), iter(range(total))
    kept = [[next(places) != left_out for _ in getattr(batch, items)] for batch in batches]
    some = list[Any]()
    for batch, stays in zip(batches, kept, strict=True):
        pages: Sequence[Any] = getattr(batch, items)
        some.append(type(batch)(batch.namespace, list(itertools.compress(pages, stays))))
    answers = [iter(answer) for answer in ask(some, call)]
    return [
        [is_kept and next(answer) for is_kept in stays]
        for stays, answer in zip(kept, answers, strict=True)
    ]
