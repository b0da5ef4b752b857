"""The tiny language model: its logits do not depend on where a prefix came from, and would differ
if a byte did."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from hicache_storage.hybrid import build_hybrid_stack
from hicache_storage.pools import DevicePool
from hicache_storage.spec import PoolName
from tests.support.commands import run_program
from tests.support.pools import page_layer

pytestmark = pytest.mark.merge

EXAMPLES = Path(__file__).parents[2] / "examples"
SEED = 3
SMALL = ("--clients", "6", "--rounds", "3", "--running", "2")
"""With as many clients none has a third of all tokens, so that one of them stays on the device,
whoever was answered first."""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As in the command: the tensors are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def example():
    """The example's modules, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        names = (
            "arithmetic",
            "chat",
            "mamba",
            "model",
            "places",
            "requests",
            "server",
            "sizes",
            "sparse",
        )
        modules = {name: importlib.import_module(f"tiny_hybrid_lm_parts.{name}") for name in names}
        yield type("Example", (), {**modules, "main": importlib.import_module("tiny_hybrid_lm")})


@pytest.fixture(scope="module", params=["mamba", "dsa"])
def model(request, example):
    sizes = example.sizes.Sizes(
        device_tokens=512, host_tokens=512, device_states=4, host_states=4, seed=SEED
    )
    return example.main.MODELS[request.param](sizes)


def pools_of(model):
    """Device pools with noise in every byte that nobody has written."""
    pools = {}
    for name, geometry in model.config.pools.items():
        size, page_size = (4, 1) if name == PoolName.MAMBA else (512, 16)
        pools[name] = DevicePool(geometry, size=size, page_size=page_size, device="cpu")
        for layer in range(pools[name].layer_num):
            for slot in range(0, pools[name].size, pools[name].page_size):
                for part in page_layer(pools[name], slot, layer):
                    part.view(-1).view(torch.uint8).random_(0, 120)
    return pools


def test_every_layer_is_waited_for_before_it_is_computed(example, model):
    waited = []
    model.forward(
        [example.model.Segment([1, 2, 3], 0, torch.arange(16))], pools_of(model), waited.append
    )
    layers = {layer for geometry in model.config.pools.values() for layer in geometry.layers}
    assert waited == sorted(layers)


def played(example, tmp_path, **fields):
    """A small conversation over a new store, with everything that the command checks; how it
    went."""
    talk = example.chat.Talk(clients=5, rounds=fields.pop("rounds", 3), running=2, seed=SEED)
    options = example.main.Options(talk=talk, **fields)
    store = example.places.store(options.storage, options.given, tmp_path)
    conversation = example.chat.Conversation([[] for _ in range(talk.clients)])
    example.main.run(options, store, conversation)
    example.main.report(options, conversation, "test")
    return conversation


@pytest.mark.parametrize("driver", ["file", "hf3fs"])
@pytest.mark.parametrize("kind", ["mamba", "dsa"])
def test_prefixes_of_every_tier_give_the_bits_of_a_recomputation(
    request, example, tmp_path, kind, driver
):
    given = request.getfixturevalue("hf3fs") if driver == "hf3fs" else {}
    conversation = played(example, tmp_path, model=kind, storage=driver, given=given)
    tier = example.requests.Tier
    example.main.check_tiers(conversation, [tier.L1, tier.L2, tier.L3])
    assert len(conversation.turns) == 15
    for turn in conversation.turns:
        assert turn.equal
        assert turn.difference == 0
        # Nothing that was kept is lost, wherever it was.
        assert turn.restored.tokens == turn.restorable
    assert all(turn.restored.tokens for turn in conversation.turns if turn.round == 3)


def test_bfloat16_stays_within_its_tolerance(example, tmp_path):
    conversation = played(example, tmp_path, dtype="bfloat16")
    assert all(
        turn.equal and turn.restored.tokens == turn.restorable for turn in conversation.turns
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["mamba", "dsa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_restores_what_it_computed(example, tmp_path, kind, dtype):
    conversation = played(example, tmp_path, model=kind, dtype=dtype, device="cuda")
    assert all(
        turn.equal and turn.restored.tokens == turn.restorable for turn in conversation.turns
    )


@pytest.mark.parametrize("kind", ["mamba", "dsa"])
def test_a_damaged_page_costs_hits_and_no_logit(example, tmp_path, kind, capsys):
    conversation = played(example, tmp_path, model=kind, corrupt=True)
    example.main.check_loss(conversation)
    assert "flipped a bit in" in capsys.readouterr().out
    last = [turn for turn in conversation.turns if turn.round == 3]
    assert [turn.restored.tokens < turn.restorable for turn in last].count(True) == 1
    assert all(turn.restored.device + turn.restored.host == 0 for turn in last)
    assert all(turn.equal for turn in conversation.turns)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hit_with_wrong_bytes_is_seen(example, dtype):
    """The comparison with a recomputation detects differences, also with a tolerance."""
    sizes = example.sizes.Sizes(
        device_tokens=512,
        host_tokens=512,
        device_states=16,
        host_states=16,
        dtype=example.main.DTYPES[dtype],
    )
    model = example.mamba.mamba_model(sizes)
    talk = example.chat.Talk(clients=2, rounds=2, request=(40, 40), output=(24, 24))
    conversation = example.chat.Conversation([[], []])
    with build_hybrid_stack(model.config) as stack:
        server = example.server.Server(model.forward, stack, running=2)
        example.chat.play_round(talk, conversation, server, model)
        stack.cache.evict(10**6, 10**6)
        stack.host_pools[PoolName.MAMBA].parts[0].neg_()
        example.chat.play_round(talk, conversation, server, model)
    assert [turn.equal for turn in conversation.turns] == [True, True, False, False]
    with pytest.raises(example.main.ExampleFailedError, match="2 turns have other logits"):
        example.main.report(example.main.Options(talk=talk), conversation, "test")


def command(*options):
    return run_program(sys.executable, EXAMPLES / "tiny_hybrid_lm.py", *options)


def test_a_second_process_goes_on_where_the_first_stopped():
    done = command("--restart", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = done.stdout.split("in a second process")
    rows = {line.split()[0]: line.split()[1:] for line in second.splitlines()[1:] if line}
    assert rows["L3"][0] == rows["L3"][2] == rows["all"][0] == "6"
    restored, restorable = int(rows["all"][1]), int(rows["all"][4])
    assert restored == restorable > 0
    assert "  L1" in first


@pytest.fixture
def mooncake():
    # Here, as below: a machine with a GPU has neither Mooncake nor the server.
    from examples.mooncake_cluster import DevCluster

    with DevCluster(1, 256 << 20) as cluster:
        yield cluster.options


@pytest.fixture
def hf3fs(tmp_path):
    from tests.metadata_server.servers import SERVE
    from tests.support.metadata import Served

    with Served(command=SERVE) as server:
        yield {"path": str(tmp_path / "store"), "metadata_url": server.url}


@pytest.mark.long
@pytest.mark.parametrize(
    ("driver", "kind"), [("hf3fs", "mamba"), ("mooncake", "mamba"), ("mooncake", "dsa")]
)
def test_servers_keep_the_pages_for_a_second_process(request, driver, kind):
    given = request.getfixturevalue(driver).items()
    options = [word for name, value in given for word in ("-c", f"{name}={value}")]
    done = command("--storage", driver, *options, "--model", kind, "--restart", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.split("in a second process")[1]
    assert re.search(r"L3 +6 +[1-9][0-9]* +6\n", last)
