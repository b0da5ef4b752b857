"""The multi-turn example: its hit rates are exact, and would be others under other rules."""

from __future__ import annotations

import importlib
import json
import sys
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hicache_storage.pools import DevicePool
from tests.support.commands import run_program

pytestmark = pytest.mark.merge

EXAMPLES = Path(__file__).parents[2] / "examples"
RATES = [
    0,
    0.583333,
    0.750000,
    0.821429,
    0.861111,
    0.886364,
    0.903846,
    0.916667,
    0.926471,
    0.934211,
    0.940476,
    0.945652,
]
"""By round, for requests and outputs of four checkpoints each."""
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


def test_a_last_token_that_counted_would_show(example):
    found = example.play(example.Workload(**SMALL, rounds=2), 64, None, count_last=True)
    assert found.rounds[1] == 8 / 12


def test_another_grid_would_show(example):
    found = example.play(example.Workload(**SMALL | {"interval": 4}, rounds=2), 64, None)
    assert found.rounds[1] == 31 / 48


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
    server = example.Server(workload.sizes(8, sessions=2, offload=True), storage)
    try:
        prompt, output = list(range(64)), list(range(100, 164))
        assert server.serve([prompt], [output]) == [0]
        server.cache.evict(10**6, 10**6)
        if damaged == "kv":
            server.stack.host_pools["kv"].parts[0].add_(1)
        else:
            server.stack.host_pools["mamba"].parts[0].add_(1)
        with pytest.raises(AssertionError, match="not that of its tokens"):
            server.serve([[*prompt, *output, 7]], [[8]])
    finally:
        server.close()


@pytest.mark.long
def test_the_command_writes_what_it_found(tmp_path):
    """In the sizes that the rates are known for: pages of 64 tokens, requests and outputs of 1024,
    checkpoints every 256."""
    report, plot = tmp_path / "r.json", tmp_path / "r.svg"
    options = ("--json", report, "--plot", plot, "--sweep", "32")
    done = run_program(sys.executable, EXAMPLES / "multiturn.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert [round(rate, 6) for rate in report["rounds"]] == RATES
    assert Fraction(sum(report["cached_tokens"]), sum(report["prompt_tokens"])) == OVERALL
    assert report["overall"] == float(OVERALL)
    assert report["device_only"]["overall"] < report["overall"]
    assert [point["state_slots"] for point in report["sweep"]] == [8, 32]
    assert {point["with_storage"] for point in report["sweep"]} == {float(OVERALL)}
    lines = ElementTree.parse(tmp_path / "r.svg").findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4
    assert all(f"{rate:.6f}" in done.stdout for rate in RATES)


class OneDevice(TorchDispatchMode):
    """Refuses what CUDA refuses: to compute with tensors of two devices. Only copies may have them,
    and single numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        places = {each.device for each in args if isinstance(each, torch.Tensor) and each.dim()}
        if len(places) > 1 and func.overloadpacket not in (
            torch.ops.aten.copy_,
            torch.ops.aten._to_copy,
        ):
            raise RuntimeError(f"{func} was given tensors on {sorted(map(str, places))}")
        return func(*args, **(kwargs or {}))


def test_the_model_computes_where_its_pools_are(example):
    """On a device that is not the CPU; this one computes nothing, but is another one."""
    server = importlib.import_module("toy_hybrid_server")
    config = server.stack_config(example.Workload(**SMALL).sizes(8, sessions=2, offload=True))
    pools = [
        DevicePool(config.pools[name], size=8, page_size=page, device="meta")
        for name, page in (("kv", 4), ("mamba", 1))
    ]
    model = server.Model(*pools)
    with OneDevice():
        model.write_kv(torch.arange(4), [1, 2, 3, 4], 0)
        model.write_state(2, [1, 2, 3, 4], 0)
        model.copy_state(2, 3)
    with pytest.raises(RuntimeError, match="tensors on"), OneDevice():
        pools[0].parts[0][0][torch.arange(4), 0] = torch.zeros(4, 2, dtype=torch.int32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_serves_with_the_same_rates(example, tmp_path):
    found = example.play(example.Workload(**SMALL), 4, tmp_path / "store", sessions=3)
    assert rates(found) == RATES
