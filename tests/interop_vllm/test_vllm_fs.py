"""vLLM's own `fs` tier in the same situations: the answers that docs/matrix.md tells of."""

from __future__ import annotations

import pytest

from tests.interop_vllm.engine_server import REUSED, Answer, EngineServer, prompt, vllm_fs, write

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def model(place):
    return write(place / "model")


@pytest.fixture(scope="module")
def answers(place, model) -> dict[int, tuple[int, ...]]:
    """Right answers of one rank, whose chunks are in `place / "store"` afterwards; of prompt 6 some
    bytes are damaged."""
    with EngineServer(place, model, vllm_fs(place / "store")) as server:
        server.wait_until_up()
        first = {number: server.ask(prompt(number)) for number in (5, 6)}
        assert {answer.cached for answer in first.values()} == {0}
        stored = "vllm:kv_offload_tiering_write_bytes_total"
        server.wait_for(
            lambda: server.counted(stored) >= 2 * 20 * 131_072, "the chunks are not stored"
        )
        server.forget()
        assert server.ask(prompt(5)) == Answer(first[5].tokens, REUSED)
        for file in (place / "store").rglob("*.bin"):
            with file.open("r+b") as chunk:
                chunk.seek(4096)
                chunk.write(bytes(range(100, 164)))
        server.forget()
        damaged = server.ask(prompt(6))
        # With this the file is put back as it was, for the server of two ranks.
        return {5: first[5].tokens, 6: first[6].tokens, -6: damaged.tokens, 0: (damaged.cached,)}


def test_damaged_bytes_are_delivered(answers):
    assert answers[0] == (REUSED,)
    assert answers[-6] != answers[6]
