"""vLLM's own `fs` tier in the same situations: the wrong answers that docs/matrix.md tells of.

They are vLLM's to mend; a test that fails here says that it was.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.interop_vllm.engine_server import REUSED, Answer, EngineServer, prompt, vllm_fs, write

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]

CHUNK_BYTES = 131_072


@dataclass(frozen=True)
class Seen:
    """What a server of one rank has answered."""

    place: Path
    right: Answer
    """With nothing stored."""
    restored: Answer
    """From a store that nobody has touched, a copy of which is `place / "copy"`."""
    damaged: Answer
    """From that store after 64 bytes of each file were overwritten."""
    log: str


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Seen:
    place = tmp_path_factory.mktemp("engine")
    with EngineServer(place, write(place / "model"), vllm_fs(place / "store")) as server:
        server.wait_until_up()
        right = server.ask(prompt(5))
        files = REUSED // 32

        def stored() -> bool:
            return len(list((place / "store").rglob("*.bin"))) == files

        server.wait_for(stored, "the chunks are not stored")
        shutil.copytree(place / "store", place / "copy")
        server.forget()
        restored = server.ask(prompt(5))
        for file in (place / "store").rglob("*.bin"):
            assert file.stat().st_size == CHUNK_BYTES
            with file.open("r+b") as chunk:
                chunk.seek(CHUNK_BYTES // 2)
                chunk.write(bytes(range(100, 164)))
        server.forget()
        before = len(server.text())
        damaged = server.ask(prompt(5))
        return Seen(place, right, restored, damaged, server.text()[before:])


def test_damaged_bytes_are_delivered_with_no_line_in_the_log(seen):
    assert seen.restored == Answer(seen.right.tokens, REUSED)
    assert seen.damaged.cached == REUSED
    assert seen.damaged.tokens != seen.right.tokens
    assert "WARNING" not in seen.log
    assert "ERROR" not in seen.log


def test_another_tp_size_is_served_with_the_chunks_of_the_first(seen):
    tier = vllm_fs(seen.place / "copy")
    with EngineServer(seen.place, seen.place / "model", tier, ranks=2) as two:
        two.wait_until_up()
        answer = two.ask(prompt(5))
    assert answer.cached == REUSED
    assert answer.tokens != seen.right.tokens
