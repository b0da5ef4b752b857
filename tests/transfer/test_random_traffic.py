"""Kernels, write-backs, loads and frees in random order on few pages keep ST-1 to ST-3."""

from __future__ import annotations

from random import Random

import pytest
from transfer_bench import PAGES, POOLS, Bench, same

from hicache_storage.transfer.plan import WAYS

STEPS = 12


@pytest.mark.parametrize(("kind", "layout"), POOLS)
@pytest.mark.parametrize("way", WAYS)
def test_random_traffic(simulated, way, kind, layout):
    """Nothing is waited for: by the order of the calls every page holds what it should, and no race
    is found."""
    random = Random(f"{way} {kind} {layout}")
    bench = Bench(simulated, kind, layout, way)
    contents = [bench.content(seed) for seed in range(PAGES)]
    on_device, backed_up, seen = {}, [], []

    def run_kernel(page):
        on_device[page] = random.choice(contents)
        bench.run_kernel(page, on_device[page])

    def write_back(pages):
        while (host := bench.alloc(len(pages))) is None:
            # Those that are free are still in use by copies, some of which run when they are asked.
            if backed_up:
                bench.host_slots.free(backed_up.pop(0)[1])
        acknowledgement = bench.write_back(bench.slots(*pages), host)
        copied = [on_device[page] for page in pages]
        if random.random() < 0.3:
            bench.wait(acknowledgement)
            assert same(bench.host_content(host), copied[0])
        backed_up.append((copied, host))

    def load(pages):
        copied, host = random.choice(backed_up)
        # What is only read may occur twice.
        sources = [random.randrange(len(copied)) for _ in pages]
        counter = bench.load(host.view(len(copied), -1)[sources].view(-1), bench.slots(*pages))
        on_device.update({page: copied[of] for page, of in zip(pages, sources, strict=True)})
        seen.extend(zip(bench.read_pages(pages, counter), map(on_device.get, pages), strict=True))

    for page in range(PAGES):
        run_kernel(page)
    for _ in range(STEPS):
        pages = random.sample(range(PAGES), random.randint(1, PAGES - 2))
        match random.randrange(4):
            case 0:
                run_kernel(pages[0])
            case 1 if backed_up:
                load(pages)
            case 2 if backed_up:
                # It may be handed out only when the copies that use it are done.
                bench.host_slots.free(backed_up.pop(random.randrange(len(backed_up)))[1])
            case _:
                write_back(pages)
        bench.place.check()
    seen += [(bench.read(page), content) for page, content in on_device.items()]
    bench.finish()
    assert all(same(found, content) for found, content in seen)
