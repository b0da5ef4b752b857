"""Kernels, write-backs, loads and frees in random order on few pages keep ST-1 to ST-3."""

from __future__ import annotations

from random import Random

import pytest
from transfer_bench import POOLS, Bench, same

from hicache_storage.transfer.plan import WAYS

DEVICE_PAGES, HOST_PAGES, STEPS = 3, 4, 24


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("way", WAYS)
def test_random_traffic(simulated, way, seed):
    random = Random(f"{way} {seed}")
    bench = Bench(simulated, *random.choice(POOLS), way)
    backed_up, seen = [], []
    for number in range(STEPS):
        page = random.randrange(DEVICE_PAGES)
        if backed_up and random.random() < 0.5:
            content, host = random.choice(backed_up)
            counter = bench.load(host, bench.slots(page))
            seen.append((bench.read(page, counter), content))
        else:
            content = bench.content(number)
            bench.run_kernel(page, content)
            while (host := bench.alloc()) is None:
                # All free ones are still in use by copies, some of which run when they are asked.
                pass
            acknowledgement = bench.write_back(bench.slots(page), host)
            if random.random() < 0.5:
                bench.wait(acknowledgement)
                assert same(bench.host_content(host), content)
            backed_up.append((content, host))
        while len(backed_up) >= HOST_PAGES or (backed_up and random.random() < 0.2):
            _, host = backed_up.pop(random.randrange(len(backed_up)))
            bench.host_slots.free(host)
            # Freed while copies use it: it may be handed out only when they are done.
            bench.host_slots.available_size()
        bench.place.check()
    bench.finish()
    assert all(same(found, content) for found, content in seen)
