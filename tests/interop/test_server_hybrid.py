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
    prompt,
    quick_start_command,
    write_configuration,
)
from tests.interop.tiny_hybrid_model import write_hybrid_model

if TYPE_CHECKING:
    from pathlib import Path

# Two starts of a server; minutes where nothing else leaves it a processor.
pytestmark = [pytest.mark.slow(seconds=150), pytest.mark.interop, pytest.mark.timeout(900)]

RANKS = 2
PAGE_SIZE, CHUNK = 1, 128
# What SGLang has on a CPU: a state at the end of each prefill chunk, prompt and answer, which takes
# pages of one token.
OPTIONS = (
    f"--page-size {PAGE_SIZE} --chunked-prefill-size {CHUNK} --mamba-radix-cache-strategy "
    f"no_buffer --disable-overlap-schedule "
    "--max-mamba-cache-size 32"
)
RESTARTED, DAMAGED = prompt(10), prompt(20)[::-1]


@dataclass
class Past:
    """What a server answered that had nothing in storage, and what it left behind."""

    place: Path
    answers: dict[str, Answer] = field(default_factory=dict[str, Answer])

    def server(self) -> EngineServer:
        return EngineServer(
            self.place, quick_start_command(self.place / "model"), ranks=RANKS, options=OPTIONS
        )

    def ask(self, server: EngineServer, name: str, prompt: list[int]) -> None:
        """Keep the answer, and wait until every rank has stored all that it knows of it."""
        self.answers[name] = answer = server.ask(prompt)
        known = prompt + list(answer.tokens[:-1])
        server.wait_for(lambda: self.are_stored(known), f"of prompt {name!r} not all is written")

    def are_stored(self, tokens: list[int]) -> bool:
        places = [place for pool in ("kv", "mamba") for place in self.namespaces(pool)]
        return len(places) == 2 * RANKS and all(files_of(place, tokens) for place in places)

    def namespaces(self, pool: str) -> list[Path]:
        """Where the ranks have a pool's pages."""
        described = sorted((self.place / "cache").rglob("namespace.json"))
        return [path.parent for path in described if json.loads(path.read_text())["pool"] == pool]

    def second_turn(self) -> list[int]:
        """The first prompt, the answer, and what is asked then."""
        return [*RESTARTED, *self.answers["restarted"].tokens, *DAMAGED[:20]]


def files_of(namespace: Path, tokens: list[int]) -> list[Path]:
    """Those that have the page at the end of these tokens, or the state there."""
    key = page_hashes(tokens, PAGE_SIZE)[-1].encode()
    return [path for path in namespace.rglob("*.bundle") if key in path.read_bytes()]


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Past:
    """A server whose storage was filled and that has ended."""
    place = tmp_path_factory.mktemp("hybrid")
    write_hybrid_model(place / "model", seed=1)
    write_configuration(place, ranks=RANKS)
    found = Past(place)
    with found.server() as server:
        server.wait_until_up()
        found.ask(server, "restarted", RESTARTED)
        found.ask(server, "damaged", DAMAGED)
        found.ask(server, "second turn", found.second_turn())
    return found


@pytest.fixture(scope="module")
def again(past: Past):
    """The server, started again over what the first left; the first that it answered, and what was
    read for that."""
    with past.server() as server:
        answer = server.wait_until_up().ask(RESTARTED)
        yield server, answer, {pool: server.counted("read", pool=pool) for pool in ("kv", "mamba")}


@pytest.fixture
def server(again: tuple[EngineServer, Answer, object]) -> EngineServer:
    """The second server, with nothing on the device and in host memory."""
    server, *_ = again
    server.flush()
    return server


def test_a_restarted_server_has_kv_and_states_from_storage(past, again):
    """It goes on from the last state before the prompt's end."""
    _, answer, read = again
    assert past.answers["restarted"].cached == 0
    assert (answer.cached, answer.from_storage) == (REUSED, REUSED)
    assert answer.says(past.answers["restarted"])
    assert read == {"kv": [REUSED] * RANKS, "mamba": [1] * RANKS}


def test_the_second_turn_goes_on_from_the_state_at_the_end_of_the_answer(past, server):
    answer, on_device = server.ask(past.second_turn()), past.answers["second turn"]
    known = len(RESTARTED) + len(past.answers["restarted"].tokens) - 1
    assert (on_device.cached, on_device.from_storage) == (known, 0)
    assert (answer.cached, answer.from_storage) == (known, known)
    assert answer.says(on_device)


def test_another_prompt_is_answered_with_none_of_it(past, server):
    answer = server.ask([RESTARTED[0] + 1, *RESTARTED[1:]])
    assert answer.cached == 0
    assert not answer.says(past.answers["restarted"])


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
