"""A real SGLang server of two ranks on the CPU, started by the quick start's command, with our
drivers as its last tier."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.error import HTTPError

import pytest

from tests.interop.engine_server import (
    PAGES,
    REUSED,
    Answer,
    EngineServer,
    check_restored,
    prompt,
    quick_start_command,
    write_configuration,
)
from tests.interop.tiny_model import write_model

if TYPE_CHECKING:
    from pathlib import Path

# Two starts of a server; minutes where nothing else leaves it a processor.
pytestmark = [pytest.mark.slow(seconds=150), pytest.mark.interop]

RANKS = 2
RESTARTED, DAMAGED, OTHER = prompt(10), prompt(20), prompt(30)


@dataclass
class Past:
    """What a server answered that had nothing to reuse, and what it left behind."""

    place: Path
    command: list[str]
    configuration: dict[str, object]
    first: dict[int, Answer] = field(default_factory=dict)
    bundles: dict[int, list[Path]] = field(default_factory=dict)
    """Files that appeared with each prompt."""


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Past:
    """A server whose storage was filled and that has ended."""
    place = tmp_path_factory.mktemp("engine")
    write_model(place / "model", seed=1)
    configuration = write_configuration(place, ranks=RANKS)
    found = Past(place, quick_start_command(place / "model"), configuration)
    with EngineServer(place, found.command, ranks=RANKS) as server:
        server.wait_until_up()
        for asked in (RESTARTED, DAMAGED):
            before = bundles(place)
            found.first[asked[0]] = server.ask(asked)
            wait_until_stored(server, len(found.first) * PAGES)
            found.bundles[asked[0]] = sorted(bundles(place) - before)
    return found


@pytest.fixture(scope="module")
def again(past: Past):
    """The server, started again over what the first left, and the first that it answered."""
    with EngineServer(past.place, past.command, ranks=RANKS) as server:
        yield server, server.wait_until_up().ask(RESTARTED)


@pytest.fixture
def server(past: Past, again: tuple[EngineServer, Answer]) -> EngineServer:
    """The second server with the quick start's storage, and nothing on the device and in host
    memory."""
    server, _ = again
    exchange(server, past.configuration)
    return server


def exchange(server: EngineServer, configuration: dict[str, object]) -> None:
    server.detach()
    server.attach(configuration)
    server.flush()


def bundles(place: Path) -> set[Path]:
    return set((place / "cache").rglob("*.bundle"))


def wait_until_stored(server: EngineServer, pages: int) -> None:
    server.wait_for(
        lambda: min(server.counted("written")) >= pages, f"{pages} pages are not written"
    )


def test_a_restarted_server_has_the_prompt_from_storage(past, again):
    server, answer = again
    check_restored(answer, past.first[RESTARTED[0]])
    namespaces = [path.parent.name for path in (past.place / "cache").rglob("namespace.json")]
    assert len(namespaces) == RANKS
    for name in namespaces:
        assert (
            f"file: pool kv of model '{past.place / 'model'}' has its pages in namespace {name}"
            in server.log.read_text()
        )


def test_what_a_client_of_the_openai_interface_is_told(past, server):
    body = {"model": "any", "prompt": RESTARTED, "max_tokens": 1, "temperature": 0}
    usage = json.loads(server.call("POST", "/v1/completions", body))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == REUSED


@pytest.mark.parametrize("other", [{}, {"cache_salt": "another"}], ids=["token", "salt"])
def test_another_prompt_is_answered_with_none_of_it(past, server, other):
    asked = RESTARTED if other else [RESTARTED[0] + 1, *RESTARTED[1:]]
    answer = server.ask(asked, **other)
    assert answer.cached == 0
    assert answer.says(past.first[RESTARTED[0]]) == bool(other)


def test_a_damaged_page_of_one_rank_costs_hits_and_changes_no_answer(past, server):
    bundle, _ = past.bundles[DAMAGED[0]]
    stored = bytearray(bundle.read_bytes())
    stored[len(stored) // 2] ^= 0xFF
    bundle.write_bytes(stored)
    answer = server.ask(DAMAGED)
    assert 0 < answer.from_storage < REUSED
    assert answer.says(past.first[DAMAGED[0]])
    assert sorted(server.counted("damaged")) == [0, 1]


def test_a_store_is_exchanged_for_another_while_the_server_runs_and_cleared(past, server, storage):
    driver, options = storage
    exchange(server, past.configuration | {"driver": driver, "driver_config": options})
    empty = server.ask(OTHER)
    assert empty.cached == 0
    wait_until_stored(server, PAGES)
    server.flush()
    full = server.ask(OTHER)
    assert (full.cached, full.from_storage) == (REUSED, REUSED)
    server.call("POST", "/hicache/storage-backend/clear")
    server.flush()
    cleared = server.ask(OTHER)
    assert cleared.cached == 0
    assert full.says(empty)
    assert cleared.says(empty)


def test_updated_weights_have_pages_of_their_own(past, server, tmp_path):
    write_model(tmp_path / "updated", seed=2)
    server.update_weights(tmp_path / "updated", "2")
    try:
        refused = server.ask(RESTARTED)
        assert refused.cached == 0
        assert not refused.says(past.first[RESTARTED[0]])
        exchange(server, past.configuration)
        assert server.ask(RESTARTED).cached == 0
        wait_until_stored(server, PAGES)
        server.flush()
        answer = server.ask(RESTARTED)
        assert answer.from_storage == REUSED
        assert answer.says(refused)
    finally:
        server.update_weights(past.place / "model", "default")
    exchange(server, past.configuration)
    answer = server.ask(RESTARTED)
    assert answer.from_storage == REUSED
    assert answer.says(past.first[RESTARTED[0]])


def test_a_configuration_that_cannot_be_is_refused_and_the_server_goes_on(past, server):
    server.detach()
    with pytest.raises(HTTPError) as refused:
        server.attach(past.configuration | {"tenent": "acme"})
    assert "did you mean 'tenant'?" in refused.value.read().decode()
    assert server.ask(OTHER).cached == 0
    server.attach(past.configuration)
    server.flush()
    assert server.ask(RESTARTED).from_storage == REUSED
