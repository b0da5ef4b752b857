"""The three tiers around a driver: device pages (L1) and host pages (L2) on simulated streams, the driver as L3."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, cast

from hicache_conformance.memory import LentMemory
from hicache_conformance.pages import Page, short, spent
from hicache_conformance.violation import Violation
from hicache_storage.spec import PoolName, PoolTransfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from hicache_conformance.lab import Lab
    from hicache_storage.pools import MHAHostPool
    from hicache_storage.transfer import Acknowledgement, Device, LayerCounter, LayeredPages, Stream, TransferEngine
    from hicache_storage.transfer.simulator import Access, Race, StreamSimulator

LAYERS: Final = 4
PAGE_SIZE: Final = 2
HEADS: Final = 2
HEAD_DIM: Final = 8
HOST_MEMORY: Final = "the host pool"
ALLOC_STUCK: Final = "a host page never becomes free although all copies are done"
LAYOUTS: Final = ("layer_first", "page_first", "page_first_direct", "page_head")

AnswerT = TypeVar("AnswerT")


class MakeTransferEngine(Protocol):
    """Makes the engine that a pipeline copies with."""

    def __call__(self, device: Device, compute: Stream, device_pages: LayeredPages, host_pool: MHAHostPool) -> TransferEngine: ...


def sdk_engine(device: Device, compute: Stream, device_pages: LayeredPages, host_pool: MHAHostPool) -> TransferEngine:
    """The transfer engine of the SDK."""
    from hicache_storage.transfer import HostPages, PageTransfers

    return PageTransfers(device, compute, device_pages, HostPages(host_pool), host_pool)


class Pipeline:
    """Kernels that write and read self-describing pages, the engine under test, and the driver under test.

    Pages of the device are numbered; pages of the host are the slots that the engine's allocator hands out.
    """

    def __init__(self, lab: Lab, simulator: StreamSimulator, *, device_pages: int = 4, host_pages: int = 6) -> None:
        import torch

        from hicache_storage.pools import MHAHostPool
        from hicache_storage.transfer import DevicePages, HostPages

        self.simulator = simulator
        self.compute = simulator.stream("compute")
        shape = (device_pages * PAGE_SIZE, HEADS, HEAD_DIM)
        layers = [[torch.zeros(shape, dtype=torch.uint8) for _ in range(2)] for _ in range(LAYERS)]
        for layer, halves in enumerate(layers):
            for half, tensor in zip("KV", halves, strict=True):
                simulator.name(f"{half} of layer {layer} on the device", tensor)
        pool = MHAHostPool(
            size=host_pages * PAGE_SIZE, page_size=PAGE_SIZE, layer_num=LAYERS, head_num=HEADS, head_dim=HEAD_DIM,
            dtype=torch.uint8, layout=lab.random.choice(LAYOUTS), pin_memory=False,
        )  # fmt: skip
        simulator.name(HOST_MEMORY, pool.buffers[0])
        self.device_pages = DevicePages(layers, PAGE_SIZE)
        self.engine = lab.transfer_engine(simulator, self.compute, self.device_pages, pool)
        self.pool = pool
        self._host_pages = HostPages(pool)
        self._memory = LentMemory(pool)
        self.subject = lab.storage(lab.identity(layout=pool.layout, page_size=PAGE_SIZE), pools={PoolName.KV: self._memory})
        self._book = lab.book

    def run_kernels(self, pages: Sequence[int], keys: Sequence[str], generation: int = 0) -> None:
        """Launch kernels that write whole pages, behind the copies that use them."""
        self.call("before_overwrite", lambda: self.engine.before_overwrite(self.slots(pages)))
        for page, key in zip(pages, keys, strict=True):
            content = self._render(key, generation)
            for layer in range(LAYERS):
                for half, destination in enumerate(self.device_pages.page_layer(page * PAGE_SIZE, layer)):
                    self.compute.copy(
                        destination, content[half, layer], f"kernel that writes layer {layer} of device page {page}"
                    )

    def write_back(self, pages: Sequence[int], host: torch.Tensor) -> Acknowledgement:
        """Let the engine copy device pages out."""
        return self.call("write_back", lambda: self.engine.write_back(self.slots(pages), host))

    def load(self, host: torch.Tensor, pages: Sequence[int]) -> LayerCounter:
        """Let the engine copy host pages in."""
        return self.call("load", lambda: self.engine.load(host, self.slots(pages)))

    def read_layer(self, counter: LayerCounter, layer: int, pages: Sequence[int], seen: torch.Tensor) -> None:
        """Launch kernels that read a layer as soon as it has arrived; `seen[i]` takes what the i-th page held."""
        self.call("wait", lambda: counter.wait(layer, self.compute))
        for page, content in zip(pages, seen, strict=True):
            for half, source in enumerate(self.device_pages.page_layer(page * PAGE_SIZE, layer)):
                self.compute.copy(content[half, layer], source, f"kernel that reads layer {layer} of device page {page}")

    def read_pages(self, counter: LayerCounter, pages: Sequence[int]) -> torch.Tensor:
        """Launch kernels that read all layers, one after the other; what they will have seen when `compute` is done."""
        seen = self.blank(len(pages))
        for layer in range(LAYERS):
            self.read_layer(counter, layer, pages, seen)
        return seen

    def blank(self, pages: int) -> torch.Tensor:
        """Room for what kernels see of so many pages."""
        return self.device_pages.layers[0][0].new_zeros((pages, 2, LAYERS, PAGE_SIZE, HEADS, HEAD_DIM))

    def alloc(self, pages: int) -> torch.Tensor | None:
        """Host pages, if as many are free."""
        return self.call("alloc", lambda: self.engine.host_slots.alloc(pages * PAGE_SIZE))

    def take(self, pages: int) -> torch.Tensor:
        """Host pages that are free or will be when the copies in flight are done."""
        return wait_for(lambda: self.alloc(pages), "ST-3", ALLOC_STUCK)

    def free(self, host: torch.Tensor) -> None:
        """Give host pages back."""
        self.call("free", lambda: self.engine.host_slots.free(host))

    def write_host(self, keys: Sequence[str], host: torch.Tensor) -> None:
        """Fill host pages by hand, as a get would."""
        self.simulator.host("filling of host pages", writes=self.host_tensors(host))
        for key, start in zip(keys, host[::PAGE_SIZE], strict=True):
            content = self._render(key, 0)
            for layer in range(LAYERS):
                for half, destination in enumerate(self._host_pages.page_layer(int(start), layer)):
                    destination.copy_(content[half, layer])

    def store(self, keys: Sequence[str], host: torch.Tensor) -> None:
        """Set pages from host memory, which is overwritten as soon as that returns; they have to fit."""
        self.simulator.host("batch_set_v2", reads=self.host_tensors(host))
        self._move("batch_set_v2", keys, host)
        self.simulator.host("reuse of host pages", writes=self.host_tensors(host))
        for start in host[::PAGE_SIZE]:
            self._memory.write(int(start) // PAGE_SIZE, spent(self._memory.page_bytes))

    def fetch(self, keys: Sequence[str], host: torch.Tensor) -> None:
        """Get pages into host memory; they have to be there."""
        self.simulator.host("batch_get_v2", writes=self.host_tensors(host))
        self._move("batch_get_v2", keys, host)

    def host_tensors(self, host: torch.Tensor) -> list[torch.Tensor]:
        """The memory of host pages, in one view for each buffer and page."""
        starts = [int(slot) for slot in host[::PAGE_SIZE]]
        return [self.pool.get_data_page(start, flat=False) for start in starts]

    def layer_tensors(self, pages: Sequence[int], layer: int) -> list[torch.Tensor]:
        """A layer's memory in device pages."""
        return [tensor for page in pages for tensor in self.device_pages.page_layer(page * PAGE_SIZE, layer)]

    def slots(self, pages: Sequence[int]) -> torch.Tensor:
        """The slots of device pages."""
        import torch

        return torch.tensor([page * PAGE_SIZE + offset for page in pages for offset in range(PAGE_SIZE)], dtype=torch.int64)

    def writers(self, pages: Sequence[int], layers: Sequence[int] = range(LAYERS)) -> list[Access]:
        """The operations that wrote device pages last, layer by layer."""
        tensors = [tensor for layer in layers for tensor in self.layer_tensors(pages, layer)]
        return [access for tensor in tensors for access in self.simulator.writers(tensor)]

    def finish(self) -> None:
        """Wait for all kernels."""
        self.call("synchronize", self.compute.synchronize)

    def check_order(self) -> None:
        """Make sure that everything enqueued so far is in order.

        Raises:
            Violation: two operations on the same bytes are not; the message names both.
        """
        for race in self.simulator.races:
            raise Violation(broken_rule(race), str(race))

    def compare(self, keys: Sequence[str], seen: torch.Tensor, rule: str, generation: int = 0) -> None:
        """Make sure that kernels have seen the pages of these keys.

        Raises:
            Violation: `rule`; the message tells whose bytes they saw.
        """
        for index, (key, content) in enumerate(zip(keys, seen, strict=True)):
            wrong = self._book.explain(bytes(cast("list[int]", content.reshape(-1).tolist())), self._page(key, generation))
            if wrong:
                raise Violation(
                    rule, f"page {index} key {short(key)}, as a kernel sees it after its way through all tiers, {wrong}"
                )

    def restore(self, keys: Sequence[str], page: int, rule: str, generation: int = 0) -> None:
        """Bring pages back one by one, all the way from the store, and compare what a kernel sees."""
        for key in keys:
            host = self.take(1)
            self.fetch([key], host)
            counter = self.load(host, [page])
            self.free(host)
            seen = self.read_pages(counter, [page])
            self.check_order()
            self.finish()
            self.compare([key], seen, rule, generation)

    def call(self, name: str, question: Callable[[], AnswerT]) -> AnswerT:
        """Call the engine; what it raises is a violation of the running case's rule."""
        return self.subject.call(name, question)

    def _move(self, name: str, keys: Sequence[str], host: torch.Tensor) -> None:
        transfers = [PoolTransfer(PoolName.KV, host, keys=list(keys))]
        answer = self.call(name, lambda: getattr(self.subject.storage, name)(transfers))[PoolName.KV]
        if answer != [True] * len(keys):
            raise Violation("SET-1", f"{name} of {len(keys)} pages answered {answer} in an idle, nearly empty store")

    def _page(self, key: str, generation: int) -> Page:
        return Page(self.subject.identity, PoolName.KV, key, generation)

    def _render(self, key: str, generation: int) -> torch.Tensor:
        import torch

        content = bytearray(self._book.render(self._page(key, generation), self.pool.geometry.page_bytes))
        return torch.frombuffer(content, dtype=torch.uint8).view(2, LAYERS, PAGE_SIZE, HEADS, HEAD_DIM)


def wait_for(ask: Callable[[], AnswerT | None], rule: str, otherwise: str, seconds: float = 10.0) -> AnswerT:
    """Ask until there is an answer.

    Raises:
        Violation: `rule`, if there is none for so long.
    """
    tick = threading.Event()
    for _ in range(int(seconds / 0.002)):
        answer = ask()
        if answer is not None:
            return answer
        tick.wait(0.002)
    raise Violation(rule, otherwise)


def broken_rule(race: Race) -> str:
    """The rule that a race breaks, by who touches what."""
    by_kernel = [access.what.startswith("kernel") for access in (race.first, race.second)]
    if race.memory.endswith(HOST_MEMORY):
        # A set reads what the engine said had been copied; everything else is about who owns the page.
        return "ST-1" if race.second.what == "batch_set_v2" else "ST-3"
    starts_early = race.first_writes and not race.second_writes and by_kernel == [False, True]
    return "ST-2" if starts_early else "ST-1"
