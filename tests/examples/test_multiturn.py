"""The multi-turn example: its hit rates are exact, and would be others under other rules."""

from __future__ import annotations

import importlib
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from tests.support.commands import run_program

pytestmark = pytest.mark.merge

EXAMPLES = Path(__file__).parents[2] / "examples"
RATES = [0, *(round((8 * number - 1) / (8 * number + 4), 6) for number in range(1, 12))]
"""By round, for requests and outputs of four checkpoints each: of those before a request, all but
the last are found."""
OVERALL = Fraction(517, 576)
SMALL = {"request": 64, "output": 64, "page": 4, "state_chunk": 4, "interval": 16}
"""A sixteenth of every length: as many pages and checkpoints, the same rates."""


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("multiturn")


def rates(result):
    return [round(rate, 6) for rate in result.rounds]


def overall(result):
    return Fraction(sum(result.cached_tokens), sum(result.prompt_tokens))


def test_with_storage_few_slots_serve_like_many(example, tmp_path):
    """Slots for two running requests and KV of three sessions on the device, two sessions on the
    host, the rest in files."""
    found = example.play(example.Workload(**SMALL), 4, tmp_path / "store", sessions=3)
    assert rates(found) == RATES
    assert overall(found) == OVERALL


def test_without_storage_the_rate_falls_with_the_slots(example):
    workload = example.Workload(**SMALL)
    found = [example.play(workload, slots, None) for slots in (8, 16, 64)]
    assert overall(found[0]) < overall(found[1]) < overall(found[2]) == OVERALL
    assert rates(found[2]) == RATES
    assert all(few <= many for few, many in zip(found[0].rounds, found[2].rounds, strict=True))


@pytest.mark.parametrize("damaged", ["kv", "state"])
def test_a_hit_with_wrong_bytes_is_no_hit_that_counts(example, tmp_path, damaged):
    """The comparison with a recomputation detects differences."""
    workload = example.Workload(**SMALL)
    storage = example.create_storage(
        "file",
        example.StorageIdentity(
            model="m", kv_dtype="int32", page_size=workload.page, layout="page_first"
        ),
        {"path": str(tmp_path / "store")},
    )
    config = workload.config(8, sessions=2, offload=True)
    with example.build_hybrid_stack(config) as stack:
        stack.attach(storage)
        server = example.ToyServer(stack, running=1)
        prompt, output = list(range(64)), list(range(100, 164))
        assert example.serve(server, [prompt], [output]) == 0
        stack.cache.evict(10**6, 10**6)
        stack.host_pools["kv" if damaged == "kv" else "mamba"].parts[0].add_(1)
        with pytest.raises(AssertionError, match="not that of its tokens"):
            example.serve(server, [[*prompt, *output, 7]], [[8]])


def test_the_command_prints_what_it_found():
    """In the sizes that the rates are known for: pages of 64 tokens, requests and outputs of 1024,
    checkpoints every 256."""
    done = run_program(sys.executable, EXAMPLES / "multiturn.py")
    assert done.returncode == 0, done.stdout + done.stderr
    *rounds, total = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [float(stored) for _, stored, _ in rounds] == RATES
    assert float(total[1]) == round(float(OVERALL), 6) > float(total[2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_serves_with_the_same_rates(example, tmp_path):
    found = example.play(example.Workload(**SMALL), 4, tmp_path / "store", sessions=3)
    assert rates(found) == RATES
