"""Several processes with gloo: whatever each rank has and meets, all are told the same, and nobody
waits for ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.hybrid.rank import SECONDS, TURNS
from tests.hybrid.stack import PAGE

ROOT = Path(__file__).parents[2]
STEPS = 80

pytestmark = [pytest.mark.slow(seconds=40), pytest.mark.timeout(SECONDS + 90)]


def run(scenarios, folder, *, gone=(), **settings):
    """Run scenarios on all ranks, one after the other; for each what every rank was told, and what
    is its own."""
    world = settings.get("tp", 1) * settings.get("cp", 1) * settings.get("pp", 1)
    command = [sys.executable, "-W", "error", "-m", "tests.hybrid.rank", ",".join(scenarios)]
    process = subprocess.Popen(
        [*command, str(folder), json.dumps(settings)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        process_group=0,
    )
    try:
        status = process.wait(timeout=SECONDS + 40)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    said = "".join(
        f"\nrank {log.stem}:\n{log.read_text()[-4000:]}" for log in sorted(folder.glob("*.log"))
    )
    assert not status, said
    return {
        name: _agreed(folder, name, [rank for rank in range(world) if rank not in gone])
        for name in scenarios
    }


def _agreed(folder, scenario, ranks):
    found = [json.loads((folder / f"{scenario}.{rank}.json").read_text()) for rank in ranks]
    assert all(one["told"] == found[0]["told"] for one in found), found
    return found


WORLDS = {
    "tp2-cp2": (["serving"], {"tp": 2, "cp": 2}),
    "pp2": (["serving", "building"], {"pp": 2}),
}
"""Scenarios of each arrangement of ranks; to start processes takes longer than most of them."""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """What came of an arrangement's scenarios, which are run when they are first asked for."""
    made = {}

    def world(name):
        if name not in made:
            scenarios, shape = WORLDS[name]
            folder = tmp_path_factory.mktemp(name)
            made[name] = run(
                scenarios,
                folder,
                **shape,
                steps=STEPS,
                seed="ranks",
                path=str(folder / "store"),
            )
        return made[name]

    return world


@pytest.mark.parametrize("name", WORLDS)
def test_caches_of_all_ranks_stay_the_same(worlds, name):
    """What is fetched in good weather is the longest prefix that the stores of all ranks have and
    their hosts have room for, and of every byte its owner's."""
    found = worlds(name)["serving"]
    fetched = [what[1:] for what in found[0]["told"] if what[0] == "fetched"]
    for bad, number, length in fetched:
        if not bad:
            common = set.intersection(*(set(one["own"][str(number)]) for one in found))
            assert length == max(common, default=0) * PAGE, number
    assert {bad for bad, *_ in fetched} == {False, True}
    assert len({length for *_, length in fetched}) >= TURNS
    told = found[0]["told"]
    assert dict(what for what in told if what[0] == "loaded")["loaded"], "nothing was loaded"


def test_a_lost_rank_is_told(tmp_path):
    found = run(["lost"], tmp_path, gone=[0], tp=2)["lost"]
    assert [what[0] for what in found[0]["told"]] == ["lost", "lost", "collectives"]


def test_stacks_are_built_together(worlds):
    """A fault of one rank is a refusal for both, and then both serve."""
    found = worlds("pp2")["building"]
    assert found[0]["own"] == ["OtherRankError", "OtherRankError", "ConfigError"]
    assert found[1]["own"] == ["ConfigError"] * 3
    closed = "the rank group is unusable: the rank group was closed"
    assert found[0]["told"][0] == ["closed", closed]
