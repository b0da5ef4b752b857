"""A real SGLang server of two ranks on the CPU with a hybrid model: what it stores of a prompt is
KV, and states of its linear layers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from hicache_storage.hybrid.hashing import page_hashes
from tests.interop.engine_server import (
    REUSED,
    Answer,
    EngineServer,
    check_restored,
    prompt,
    quick_start_command,
    write_configuration,
)
from tests.interop.tiny_model import HYBRID, write_model

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

# One start of a server; minutes where nothing else leaves it a processor.
pytestmark = [pytest.mark.slow(seconds=80), pytest.mark.interop]

RANKS = 2
PAGE_SIZE, CHUNK = 1, 128
# What SGLang has on a CPU: a state at the end of each prefill chunk, prompt and answer, which takes
# pages of one token.
OPTIONS = (
    f"--page-size {PAGE_SIZE} --chunked-prefill-size {CHUNK} --mamba-radix-cache-strategy "
    f"no_buffer --disable-overlap-schedule "
    "--max-mamba-cache-size 32"
)
FIRST, DAMAGED = prompt(10), prompt(20)[::-1]


@dataclass
class Past:
    """What a server answered that had nothing in storage, and what was stored."""

    place: Path
    server: EngineServer
    answers: dict[str, Answer] = field(default_factory=dict[str, Answer])

    def ask(self, name: str, prompt: list[int]) -> None:
        """Keep the answer, and wait until every rank has stored all that it knows of it."""
        self.answers[name] = answer = self.server.ask(prompt)
        known = prompt + list(answer.tokens[:-1])
        self.server.wait_for(
            lambda: self.are_stored(known), f"of prompt {name!r} not all is written"
        )

    def are_stored(self, tokens: list[int]) -> bool:
        places = [place for pool in ("kv", "mamba") for place in self.namespaces(pool)]
        return len(places) == 2 * RANKS and all(files_of(place, tokens) for place in places)

    def namespaces(self, pool: str) -> list[Path]:
        """Where the ranks have a pool's pages."""
        described = sorted((self.place / "cache").rglob("namespace.json"))
        return [path.parent for path in described if json.loads(path.read_text())["pool"] == pool]

    def second_turn(self) -> list[int]:
        """The first prompt, the answer, and what is asked then."""
        return [*FIRST, *self.answers["first"].tokens, *DAMAGED[:20]]


def files_of(namespace: Path, tokens: list[int]) -> list[Path]:
    """Those that have the page at the end of these tokens, or the state there."""
    key = page_hashes(tokens, PAGE_SIZE)[-1].encode()
    return [path for path in namespace.rglob("*.bundle") if key in path.read_bytes()]


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.long)],
    ids=["flushed", "restarted"],
)
def past(request, tmp_path_factory: pytest.TempPathFactory) -> Generator[Past]:
    """A server whose storage was filled, or one that was started again over it."""
    place = tmp_path_factory.mktemp("hybrid")
    write_model(place / "model", seed=1, config=HYBRID)
    write_configuration(place, ranks=RANKS)
    command = quick_start_command(place / "model")
    with EngineServer(place, command, ranks=RANKS, options=OPTIONS) as server:
        found = Past(place, server.wait_until_up())
        found.ask("first", FIRST)
        found.ask("damaged", DAMAGED)
        found.ask("second turn", found.second_turn())
        if not request.param:
            yield found
            return
    with EngineServer(place, command, ranks=RANKS, options=OPTIONS) as server:
        found.server = server.wait_until_up()
        yield found


@pytest.fixture
def server(past: Past) -> EngineServer:
    """The server, with nothing on the device and in host memory."""
    past.server.flush()
    return past.server


def test_kv_and_states_come_from_storage(past, server):
    """It goes on from the last state before the prompt's end."""

    def read() -> list[list[int]]:
        return [server.counted("read", pool=pool) for pool in ("kv", "mamba")]

    before = read()
    check_restored(server.ask(FIRST), past.answers["first"])
    moved = [
        [now - then for now, then in zip(*pool, strict=True)]
        for pool in zip(read(), before, strict=True)
    ]
    assert moved == [[REUSED] * RANKS, [1] * RANKS]


def test_the_second_turn_goes_on_from_the_state_at_the_end_of_the_answer(past, server):
    answer, on_device = server.ask(past.second_turn()), past.answers["second turn"]
    known = len(FIRST) + len(past.answers["first"].tokens) - 1
    assert (on_device.cached, on_device.from_storage) == (known, 0)
    assert (answer.cached, answer.from_storage) == (known, known)
    assert answer.says(on_device)


def test_a_damaged_state_of_one_rank_costs_hits_and_changes_no_answer(past, server):
    """Without it the KV is of no use, until the state has been computed and stored again."""
    namespace, state = past.namespaces("mamba")[0], DAMAGED[:REUSED]
    [file] = files_of(namespace, state)
    stored = bytearray(file.read_bytes())
    # The sign and exponent of a number in the temporal state, which the answer would tell.
    stored[len(stored) // 8 * 4 + 3] ^= 0xFF
    file.write_bytes(stored)
    answer = server.ask(DAMAGED)
    assert answer.cached == 0
    assert answer.says(past.answers["damaged"])
    assert sorted(server.counted("damaged", pool="mamba")) == [0, 1]
    server.wait_for(
        lambda: files_of(namespace, state) not in ([file], []), "the state is not written again"
    )
    server.flush()
    repaired = server.ask(DAMAGED)
    assert (repaired.cached, repaired.from_storage) == (REUSED, REUSED)
    assert repaired.says(past.answers["damaged"])
