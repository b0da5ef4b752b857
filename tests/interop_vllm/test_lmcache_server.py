"""LMCache's own server with this project's adapter, and a vLLM server in front of it: both are
started again, and the prompt comes from storage."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Self

import pytest

from hicache_conformance.harness.ports import accepts, free_ports
from tests.interop.server_process import WAIT_SECONDS
from tests.interop_vllm.engine_server import REUSED, Answer, EngineServer, prompt, write

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


class CacheServer:
    """`lmcache server`, until the block ends; then it is killed."""

    def __init__(self, place: Path, store: Path) -> None:
        self.port, self.http_port = free_ports(2)
        self.log = place / f"lmcache-{len(list(place.glob('lmcache-*')))}.log"
        adapter = {
            "type": "plugin",
            "module_path": "hicache_storage.engines.lmcache",
            "class_name": "HiCacheL2Adapter",
            "adapter_params": {"driver": "file", "driver_config": {"path": str(store)}},
        }
        self.argv = [
            *(sys.executable, "-c", "from lmcache.cli.main import main; main()", "server"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--http-port", str(self.http_port)),
            *("--chunk-size", "64", "--l1-size-gb", "0.25", "--eviction-policy", "LRU"),
            *("--max-workers", "2", "--supported-transfer-mode", "engine_driven"),
            *("--l2-adapter", json.dumps(adapter)),
        ]

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.argv,
                env={**os.environ, "PYTHONHASHSEED": "0"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + WAIT_SECONDS
        while not accepts(self.http_port):
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(self.log.read_text(errors="replace")[-6000:])
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def transfer(self) -> dict[str, object]:
        """vLLM's configuration of a connector to this server."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self.port,
            },
        }

    def status(self) -> str:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.http_port}/status", timeout=30
        ) as page:
            return page.read().decode()


def ask(place: Path, model: Path, store: Path, *, pages: int) -> Answer:
    """Start both servers, ask once, wait until that many pages are stored, and kill both."""
    with CacheServer(place, store) as cache:
        arguments = ("--kv-transfer-config", json.dumps(cache.transfer()))
        engine = EngineServer(place, model, None, arguments=arguments)
        engine.environment["PYTHONHASHSEED"] = "0"
        with engine as server:
            server.wait_until_up()
            answer = server.ask(prompt(5))
            server.wait_for(
                lambda: sum(file.stat().st_size for file in store.rglob("*.bundle")) >= pages,
                "the pages are not stored",
            )
            return answer


def test_servers_that_are_started_again_have_the_prompt_from_storage(tmp_path):
    model = write(tmp_path / "model")
    with EngineServer(tmp_path, model, None) as alone:
        right = alone.wait_until_up().ask(prompt(5))
    stored = REUSED * 4096
    assert ask(tmp_path, model, tmp_path / "store", pages=stored) == right
    again = ask(tmp_path, model, tmp_path / "store", pages=stored)
    assert again == Answer(right.tokens, REUSED)
