"""Several processes with gloo: whatever each rank has and meets, all are told the same, and nobody waits for ever."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_storage.spec import PoolHitPolicy, PoolPresence, common_hit
from tests.hybrid.rank import PAGES, presence, pressure

ROOT = Path(__file__).parents[2]
SECONDS = 240
ROUNDS = 40

pytestmark = pytest.mark.timeout(SECONDS + 60)


def run(scenario, folder, *, gone=(), **settings):
    """Run a scenario on all ranks; what each was told, and wrote."""
    world = settings.get("tp", 1) * settings.get("cp", 1) * settings.get("pp", 1)
    command = [sys.executable, "-W", "error", "-m", "tests.hybrid.rank", scenario]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder), json.dumps(settings)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, (process, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert process.returncode == 0, f"rank {rank}:\n{output}"
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world) if rank not in gone]
    assert all(one["told"] == found[0]["told"] for one in found), found
    return found


SHAPES = [{"tp": 2, "cp": 2}, {"pp": 2}]
SHAPE_NAMES = ["tp2-cp2", "pp2"]


def test_endpoints_are_intersected(tmp_path):
    """The peer agrees on the smaller of the largest, which one of the ranks cannot restore, and discards all."""
    ends = [[[3, 6], [3, 7]], [[6], [7]], [[8], [8]], [[1, 2, 5], [2, 4, 5]], [[], [4]]]
    found = run("sets", tmp_path, tp=2, ends=ends)
    assert [what[1] for what in found[0]["told"] if what[0] == "restored"] == [3, 0, 8, 5, 0]


def expected(seed, ranks):
    """The longest prefix that every rank can restore and has room for."""
    restorable = set(range(1, PAGES + 1))
    for rank in range(ranks):
        kv, states = presence(seed, rank)
        pages, used = pressure(seed, rank)
        hit = common_hit(kv, [PoolPresence("mamba", states, PoolHitPolicy.TRAILING_PAGES), PoolPresence("indexer", kv)])
        restorable &= {end for end in hit.restorable_prefix_pages if end <= 16 - pages and used < 4}
    return restorable


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_NAMES)
def test_all_ranks_are_told_the_same(tmp_path, shape):
    ranks = shape.get("tp", 1) * shape.get("cp", 1) * shape.get("pp", 1)
    found = run("chances", tmp_path, **shape, rounds=ROUNDS, seed="ranks")
    hits = set()
    rounds = [what for what in found[0]["told"] if what[0] == "round"]
    assert len(rounds) == ROUNDS
    for _, number, faulty, early, pages, *_ in rounds:
        possible = expected(f"ranks/{number}", ranks)
        assert pages in possible | {0}
        if not faulty and not early:
            assert pages == max(possible, default=0), number
            hits.add(pages)
    assert len(hits) > 2


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_NAMES)
def test_a_storage_is_attached_everywhere_or_nowhere(tmp_path, shape):
    ranks = shape.get("tp", 1) * shape.get("cp", 1) * shape.get("pp", 1)
    found = run("attaching", tmp_path, **shape)
    assert found[0]["told"][:-1] == [["refused", True, True, False]] * ranks + [["restored", PAGES]]


def test_ranks_that_differ_are_refused(tmp_path):
    found = run("unlike", tmp_path, pp=2)
    refused = ["refused", "ranks differ in their pools, slots, page size, rules or kind of keys"]
    assert found[0]["told"][:-1] == [refused, refused]


def test_each_shard_of_a_replicated_pool_is_written_once(tmp_path):
    """With a writer of global rank 0 alone, the second CP shard is never written and nothing is ever hit."""
    found = run("shards", tmp_path, tp=2, cp=2, path=str(tmp_path / "store"))
    assert found[0]["told"][:2] == [["stored", PAGES, True], ["restored", PAGES]]
    assert [one["wrote"].get("kv", 0) for one in found] == [PAGES, 0, PAGES, 0]
    assert [one["wrote"].get("mamba", 0) for one in found] == [2, 2, 2, 2]


def test_a_lost_rank_is_told(tmp_path):
    found = run("lost", tmp_path, gone=[0], tp=2)
    assert [what[0] for what in found[0]["told"]] == ["lost", "lost", "collectives"]
