"""Kernels, write-backs, loads and frees in random order on few pages keep ST-1 to ST-3."""

from __future__ import annotations

from random import Random

import pytest

from hicache_storage.transfer.plan import WAYS
from tests.transfer.rig import PAGES, POOLS, Rig, same

STEPS = 12


@pytest.mark.parametrize(("model", "layout"), POOLS)
@pytest.mark.parametrize("way", WAYS)
def test_random_traffic(simulated, way, model, layout):
    """Nothing is waited for: by the order of the calls every page holds what it should, and no race
    is found."""
    random = Random(f"{way} {model} {layout}")
    rig = Rig(simulated, model, layout, way)
    contents = [rig.content(seed) for seed in range(PAGES)]
    on_device, backed_up, seen = {}, [], []

    def run_kernel(page):
        on_device[page] = random.choice(contents)
        rig.run_kernel(page, on_device[page])

    def write_back(pages):
        while (host := rig.alloc(len(pages))) is None:
            # Those that are free are still in use by copies, some of which run when they are asked.
            if backed_up:
                rig.free(backed_up.pop(0)[1])
        acknowledgement = rig.write_back(rig.slots(*pages), host)
        copied = [on_device[page] for page in pages]
        if random.random() < 0.3:
            rig.wait(acknowledgement)
            assert same(rig.host_content(host), copied[0])
        backed_up.append((copied, host))

    def load(pages):
        copied, host = random.choice(backed_up)
        # What is only read may occur twice.
        sources = [random.randrange(len(copied)) for _ in pages]
        counter = rig.load(rig.some(host, sources), rig.slots(*pages))
        on_device.update({page: copied[of] for page, of in zip(pages, sources, strict=True)})
        seen.extend(zip(rig.read_pages(pages, counter), map(on_device.get, pages), strict=True))

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
                rig.free(backed_up.pop(random.randrange(len(backed_up)))[1])
            case _:
                write_back(pages)
        rig.place.check()
    seen += [(rig.read(page), content) for page, content in on_device.items()]
    rig.finish()
    assert all(same(found, content) for found, content in seen)
