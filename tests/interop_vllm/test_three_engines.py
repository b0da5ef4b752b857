"""SGLang, vLLM and LMCache at once on one store: nothing of one is delivered to another, and they share
the capacity.

SGLang runs in an environment of its own, which `make test-long` builds too.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.interop import engine_server as sglang
from tests.interop.server_process import counted
from tests.interop.stores import Store, opened, tier
from tests.interop.tiny_model import write_model
from tests.interop_vllm.cache_server import CacheServer
from tests.interop_vllm.engine_server import EngineServer, prompt, write

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
SGLANG = Path(os.environ.get("HICACHE_SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
PROMPTS, FLOOD = (5, 6, 7, 8), (11, 12, 13, 14, 15, 16)
ROUNDS = 2
CAPACITY = 9 << 20
"""Bytes, less than the prompts of vLLM have, and less than those of LMCache."""


@dataclass
class Engine:
    """An engine that is asked, and what it has answered with nothing to reuse."""

    ask: Callable[[int], tuple[tuple[int, ...], int]]
    """By the number of a prompt: tokens, and how many of the prompt were cached."""
    forget: Callable[[], None]
    """Empties the device and the host."""
    metrics: Callable[[], str]
    """Its text for Prometheus."""
    first: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])

    def check(self, number: int) -> int:
        """Ask, and check that the answer is the first one; how many tokens were cached."""
        tokens, cached = self.ask(number)
        assert self.first.setdefault(number, tokens) == tokens
        return cached

    def counted(self, name: str) -> float:
        """The sum of a counter's series."""
        return counted(self.metrics(), name)


@dataclass(frozen=True)
class Machine:
    """What runs."""

    store: Store
    place: Path
    engines: dict[str, Engine]

    def stored_bytes(self) -> int:
        """Of the directory of the file driver."""
        sizes = list[int]()
        for file in (self.place / "store").rglob("*.bundle"):
            try:
                sizes.append(file.stat().st_size)
            except FileNotFoundError:
                # It was evicted.
                continue
        return sum(sizes)


@pytest.fixture(scope="module", params=["file", "hf3fs"])
def machine(request, tmp_path_factory) -> Generator[Machine]:
    place = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        store = stack.enter_context(opened(request.param, place))
        # The 3FS driver has a file for each namespace, and its size is the capacity.
        limit = "capacity" if request.param == "file" else "file_size"
        store.options[limit] = CAPACITY
        model = write(place / "model")
        vllm = EngineServer(place, model, tier(store))
        cache = CacheServer(place, store.driver, store.options)
        front = EngineServer(place, model, None, arguments=cache.connector())
        front.environment["PYTHONHASHSEED"] = "0"
        (place / "sglang").mkdir()
        write_model(place / "sglang" / "model", seed=1)
        configuration = sglang.write_configuration(place / "sglang", ranks=1) | {
            "driver": store.driver,
            "driver_config": store.options,
        }
        (place / "sglang" / "hicache.json").write_text(json.dumps(configuration))
        other = sglang.EngineServer(
            place / "sglang",
            sglang.quick_start_command(place / "sglang" / "model"),
            ranks=1,
            python=SGLANG,
        )
        # Alone at first: it refuses to start where less than 10 GB of memory are free.
        stack.enter_context(other).wait_until_up()
        for server in (vllm, cache, front):
            stack.enter_context(server)
        for server in (vllm, front):
            server.wait_until_up()
        engines = {
            "vllm": Engine(
                lambda number: _answered(vllm, prompt(number)),
                vllm.forget,
                lambda: vllm.call("GET", "/metrics"),
            ),
            "lmcache": Engine(
                lambda number: _answered(front, prompt(number)),
                # LMCache empties its L1, too.
                front.forget,
                lambda: cache.call("GET", "/metrics"),
            ),
            "sglang": Engine(
                lambda number: _answered(other, sglang.prompt(number)),
                other.flush,
                other.metrics,
            ),
        }
        yield Machine(store, place, engines)


def _answered(
    server: EngineServer | sglang.EngineServer, tokens: list[int]
) -> tuple[tuple[int, ...], int]:
    answer = server.ask(tokens)
    return answer.tokens, answer.cached


def work(machine: Machine, name: str) -> None:
    """Ask an engine for every prompt, in an order of its own, and for each of them again."""
    engine, random = machine.engines[name], Random(name)
    for _ in range(ROUNDS):
        for number in random.sample(PROMPTS, len(PROMPTS)):
            for _ in range(2):
                engine.forget()
                engine.check(number)
                if machine.store.driver == "file":
                    assert machine.stored_bytes() <= CAPACITY


def test_nothing_of_one_engine_is_delivered_to_another(machine):
    # The first answers are computed: nothing is stored.
    for engine in machine.engines.values():
        assert [engine.check(number) for number in PROMPTS] == [0] * len(PROMPTS)
    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(work, machine, name) for name in machine.engines]:
            done.result()

    for name, engine in machine.engines.items():
        assert engine.counted("hicache_storage_read_pages_total") > 0, f"{name} has read nothing"
        assert engine.counted("hicache_storage_damaged_pages_total") == 0
    if machine.store.driver == "file":
        described = [
            json.loads(file.read_text())
            for file in (machine.place / "store").rglob("namespace.json")
        ]
        formats = [json.loads(each.get("identity.page_format", "{}")) for each in described]
        assert {each.get("engine", "") for each in formats} == {"", "lmcache", "vllm"}


@pytest.mark.parametrize("machine", ["file"], indirect=True)
def test_what_one_engine_stores_evicts_what_another_had(machine):
    """The least recently used bundles of the directory, whosever they are."""
    other = machine.engines["sglang"]
    for _ in range(2):
        other.forget()
        other.check(PROMPTS[0])
    before = sum(
        engine.counted("hicache_storage_evicted_pages_total") for engine in machine.engines.values()
    )
    assert other.counted("hicache_storage_read_pages_total") > 0
    vllm = machine.engines["vllm"]
    for number in FLOOD:
        vllm.forget()
        vllm.check(number)
    # Every page of the last prompt is stored once the caches are reset.
    vllm.forget()
    assert machine.stored_bytes() <= CAPACITY
    assert (
        sum(
            engine.counted("hicache_storage_evicted_pages_total")
            for engine in machine.engines.values()
        )
        > before
    )
    other.forget()
    assert other.check(PROMPTS[0]) == 0
