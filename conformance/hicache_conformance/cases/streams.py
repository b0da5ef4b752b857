"""Copies between device and host on streams, with the driver behind them.

They are ordered by events, layer by layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_conformance.fixtures.pipeline import LAYERS, Pipeline, wait_for
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Violation, check, checked
from hicache_storage.transfer import StreamSimulator

if TYPE_CHECKING:
    import torch

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_storage.transfer import Acknowledgement, LayerCounter
    from hicache_storage.transfer.races import Access

STREAM: Final = [Level.STREAM]


class StreamCases:
    """ST-1 to ST-3. The verdict is by what orders the operations; the bytes come second."""

    @covers("ST-1", levels=STREAM)
    def test_pages_are_copied_out_behind_their_kernels(self, context: CaseContext) -> None:
        """Kernel, write-back, and the next kernel on the same page.

        The set begins as soon as the copy is acknowledged, and the host page is reused.
        """
        with _simulator(context) as simulator:
            pipeline = Pipeline(context, simulator, host_pages=4)
            stored = list[str]()
            for _ in range(_rounds(context)):
                pages = context.random.sample(range(4), context.random.randint(1, 3))
                keys = context.keys(len(pages))
                host = pipeline.take(len(pages))
                pipeline.run_kernels(pages, keys)
                acknowledgement = pipeline.write_back(pages, host)
                pipeline.run_kernels(pages, ["overwritten"] * len(pages), generation=1)
                pipeline.check_order()
                _await(acknowledgement, context, pipeline)
                pipeline.store(keys, host)
                pipeline.check_order()
                pipeline.free(host)
                stored += keys
            pipeline.restore(stored, 0, "ST-1")

    @covers("ST-1", levels=STREAM)
    def test_pages_are_loaded_behind_their_copies_out(self, context: CaseContext) -> None:
        """Pages are loaded into a device page whose write-back has just begun.

        And into one that kernels are still reading.
        """
        with _simulator(context) as simulator:
            pipeline = Pipeline(context, simulator)
            for _ in range(_rounds(context)):
                page, (old, new, newer) = context.random.randrange(4), context.keys(3)
                source, out = _fill_host(pipeline, new), pipeline.take(1)
                pipeline.run_kernels([page], [old])
                acknowledgement = pipeline.write_back([page], out)
                following = _fill_host(pipeline, newer)
                seen = pipeline.read_pages(pipeline.load(source, [page]), [page])
                pipeline.check_order()
                seen_next = pipeline.read_pages(pipeline.load(following, [page]), [page])
                pipeline.check_order()
                _await(acknowledgement, context, pipeline)
                pipeline.store([old], out)
                pipeline.check_order()
                pipeline.finish()
                pipeline.compare([new], seen, "ST-1")
                pipeline.compare([newer], seen_next, "ST-1")
                pipeline.free(following)
                pipeline.free(source)
                pipeline.free(out)
                pipeline.restore([old], page, "ST-1")

    @covers("ST-2", levels=STREAM)
    def test_layers_start_as_they_arrive(self, context: CaseContext) -> None:
        """No layer's kernels are ordered behind a later layer's copy.

        And they finish while the last layer is held back.
        """
        with _simulator(context) as simulator:
            pipeline = Pipeline(context, simulator)
            for _ in range(_rounds(context)):
                pages, keys = context.random.sample(range(4), 2), context.keys(2)
                host = _fill_host(pipeline, *keys)
                earlier = pipeline.writers(pages)
                counter, seen = pipeline.load(host, pages), pipeline.blank(2)
                for layer in range(LAYERS):
                    pipeline.read_layer(counter, layer, pages, seen)
                    _check_start(pipeline, pages, layer, seen, earlier)
                pipeline.check_order()
                pipeline.finish()
                pipeline.compare(keys, seen, "ST-2")
                pipeline.free(host)
            _check_held_load(pipeline, context)

    @covers("ST-2", levels=STREAM)
    def test_no_layer_starts_before_it_arrives(self, context: CaseContext) -> None:
        """Pages come from the store layer by layer, and each layer is read behind its own event."""
        with _simulator(context) as simulator:
            pipeline = Pipeline(context, simulator)
            for _ in range(_rounds(context)):
                pages, keys = context.random.sample(range(4), 3), context.keys(3)
                host = _fill_host(pipeline, *keys)
                counter = pipeline.load(host, pages)
                seen = pipeline.read_pages(counter, pages)
                pipeline.check_order()
                pipeline.free(host)
                pipeline.finish()
                pipeline.compare(keys, seen, "ST-2")
                checked("ST-2")
                if counter.arrived() != LAYERS:
                    raise Violation(
                        "ST-2",
                        f"all kernels have run, and the counter has {counter.arrived()} of "
                        f"{LAYERS} layers",
                    )

    @covers("ST-3", levels=STREAM)
    def test_host_pages_in_a_load_are_not_handed_out(self, context: CaseContext) -> None:
        """Host pages are freed while a load reads them.

        Gets that come meanwhile land elsewhere, and later the pages come back.
        """
        with _simulator(context) as simulator:
            pipeline = Pipeline(context, simulator)
            for _ in range(_rounds(context)):
                pages, keys, others = (
                    context.random.sample(range(4), 2),
                    context.keys(2),
                    context.keys(4),
                )
                for key in others:
                    pipeline.free(_fill_host(pipeline, key))
                host = _fill_host(pipeline, *keys)
                simulator.is_held = True
                counter = pipeline.load(host, pages)
                seen = pipeline.read_pages(counter, pages)
                pipeline.free(host)
                taken = _take_others(pipeline, host, counter, "a load reads")
                pipeline.fetch(others, taken)
                pipeline.check_order()
                simulator.is_held = False
                pipeline.finish()
                pipeline.compare(keys, seen, "ST-3")
                again = pipeline.take(2)
                pipeline.fetch(others[:2], again)
                pipeline.check_order()
                pipeline.free(again)
                pipeline.free(taken)

    @covers("ST-3", levels=STREAM)
    def test_host_pages_in_a_write_back_are_not_handed_out(self, context: CaseContext) -> None:
        """A backup is given up while its copy is in flight.

        What is read into host memory meanwhile stays whole.
        """
        with _simulator(context) as simulator:
            pipeline = Pipeline(context, simulator)
            others = context.keys(4)
            for key in others:
                pipeline.free(_fill_host(pipeline, key))
            for _ in range(_rounds(context)):
                pages, keys = context.random.sample(range(4), 2), context.keys(2)
                host = pipeline.take(2)
                simulator.is_held = True
                pipeline.run_kernels(pages, keys)
                acknowledgement = pipeline.write_back(pages, host)
                pipeline.free(host)
                taken = _take_others(pipeline, host, acknowledgement, "a write-back fills")
                pipeline.fetch(others, taken)
                pipeline.check_order()
                simulator.is_held = False
                _await(acknowledgement, context, pipeline)
                pipeline.free(taken)
                pipeline.restore(others, pages[0], "ST-3")

    @covers("ST-1", "ST-2", "ST-3", levels=STREAM)
    def test_random_traffic(self, context: CaseContext) -> None:
        """Kernels, write-backs, sets, gets, loads and frees in random order on few pages.

        Nothing is waited for but what must be.
        """
        with _simulator(context) as simulator:
            _Traffic(context, Pipeline(context, simulator, device_pages=3, host_pages=5)).run(
                4 * _rounds(context)
            )


class _Traffic:
    """A random program that keeps the engine's rules of use."""

    def __init__(self, context: CaseContext, pipeline: Pipeline) -> None:
        self._context = context
        self._pipeline = pipeline
        self._stored = list[str]()
        self._seen: list[tuple[str, torch.Tensor]] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            page = self._context.random.randrange(3)
            if self._stored and self._context.random.random() < 0.5:
                self._bring_in(page)
            else:
                self._bring_out(page)
            self._pipeline.check_order()
        self._pipeline.finish()
        for key, seen in self._seen:
            self._pipeline.compare([key], seen, "ST-1")
        self._pipeline.restore(self._stored, 0, "ST-1")

    def _bring_out(self, page: int) -> None:
        pipeline, keys = self._pipeline, self._context.keys(1)
        host = pipeline.take(1)
        pipeline.run_kernels([page], keys)
        acknowledgement = pipeline.write_back([page], host)
        if self._context.random.random() < 0.7:
            _await(acknowledgement, self._context, pipeline)
            pipeline.store(keys, host)
            self._stored += keys
        pipeline.free(host)

    def _bring_in(self, page: int) -> None:
        pipeline, key = self._pipeline, self._context.random.choice(self._stored)
        host = pipeline.take(1)
        pipeline.fetch([key], host)
        counter = pipeline.load(host, [page])
        pipeline.free(host)
        self._seen.append((key, pipeline.read_pages(counter, [page])))


def _simulator(context: CaseContext) -> StreamSimulator:
    return StreamSimulator(context.number("streams"))


def _rounds(context: CaseContext) -> int:
    return max(3, context.profile.steps // 4)


def _await(acknowledgement: Acknowledgement, context: CaseContext, pipeline: Pipeline) -> None:
    """Learn by polling or by blocking that a write-back is done; engines do both."""
    if context.random.random() < 0.5:
        pipeline.call("wait", acknowledgement.wait)
    else:
        wait_for(
            lambda: pipeline.call("done", acknowledgement.done) or None,
            "ST-1",
            "a write-back is never acknowledged",
        )


def _fill_host(pipeline: Pipeline, *keys: str) -> torch.Tensor:
    """Host pages that a get has filled, of keys that are stored for it first."""
    host = pipeline.take(len(keys))
    pipeline.write_host(keys, host)
    pipeline.store(keys, host)
    pipeline.fetch(keys, host)
    return host


def _take_others(
    pipeline: Pipeline, busy: torch.Tensor, copy: Acknowledgement | LayerCounter, use: str
) -> torch.Tensor:
    """The four host pages that are not in flight; one that is must not be handed out."""
    taken = pipeline.take(4)
    extra = pipeline.alloc(1)
    handed = {int(slot) for slot in taken}
    if extra is not None:
        handed |= {int(slot) for slot in extra}
        pipeline.free(extra)
    check(
        not (handed & {int(slot) for slot in busy}) or pipeline.call("done", copy.done),
        "ST-3",
        f"a host page that {use} was freed, and is handed out before the copy is done",
    )
    return taken


def _check_start(
    pipeline: Pipeline, pages: list[int], layer: int, seen: torch.Tensor, earlier: list[Access]
) -> None:
    """No copy of a later layer is ordered before the kernel that reads this one."""
    kernel = pipeline.simulator.writers(seen[0, 0, layer])[0]
    for later in range(layer + 1, LAYERS):
        for copy in pipeline.writers(pages, [later]):
            check(
                copy in earlier or not kernel.follows(copy),
                "ST-2",
                f"{kernel} has to wait for {copy}",
            )


def _check_held_load(pipeline: Pipeline, context: CaseContext) -> None:
    """Run the kernels of all layers but the last, and nothing that they do not wait for."""
    pages, keys = context.random.sample(range(4), 2), context.keys(2)
    host = _fill_host(pipeline, *keys)
    pipeline.simulator.is_held = True
    counter, seen = pipeline.load(host, pages), pipeline.blank(2)
    for layer in range(LAYERS - 1):
        pipeline.read_layer(counter, layer, pages, seen)
    pipeline.finish()
    check(
        counter.arrived() < LAYERS,
        "ST-2",
        f"the kernels of layers 0 to {LAYERS - 2} ran no earlier than the copy of layer "
        f"{LAYERS - 1}",
    )
    pipeline.simulator.is_held = False
    pipeline.read_layer(counter, LAYERS - 1, pages, seen)
    pipeline.check_order()
    pipeline.finish()
    pipeline.compare(keys, seen, "ST-2")
    pipeline.free(host)
