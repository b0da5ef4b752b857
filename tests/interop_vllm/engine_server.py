"""vLLM's own server, a process of its own that runs on the CPU.

Its scheduler, KV cache manager, offloading connector and HTTP server are vLLM's. What stands in for
the worker that copies between a GPU and main memory lies in `stand_in/`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_conformance.harness.ports import free_ports
from tests.interop import tiny_model
from tests.interop.server_process import ServerProcess
from tests.interop.tiny_model import LLAMA, write_model

if TYPE_CHECKING:
    from collections.abc import Mapping

STAND_IN = Path(__file__).parent / "stand_in"
BLOCK = 32
"""Tokens of a block, the smallest that vLLM's attention on CPUs takes."""
BLOCKS = 20
"""Of a prompt, which has five tokens more."""
REUSED = BLOCKS * BLOCK
CONFIG = {**LLAMA, "head_dim": 64, "num_hidden_layers": 4}
"""Heads of 64, because vLLM's attention on CPUs wants multiples of 32."""


@dataclass(frozen=True)
class Answer:
    """What the server generated, and how many tokens of the prompt it had not to compute."""

    tokens: tuple[int, ...]
    cached: int


def prompt(number: int) -> list[int]:
    """Blocks of tokens and a few more; prompts of another number share none."""
    return tiny_model.prompt(number, REUSED)


class EngineServer(ServerProcess):
    """The server over a model, until the block ends; then all its processes are killed.

    Args:
        place: directory for its log.
        model: directory of the model.
        tier: entry of `secondary_tiers`; None starts it without any connector.
        ranks: of tensor parallelism.
        options: further options of the connector.
        arguments: further arguments of the command.
    """

    def __init__(
        self,
        place: Path,
        model: Path,
        tier: Mapping[str, object] | None,
        *,
        ranks: int = 1,
        options: Mapping[str, object] | None = None,
        arguments: tuple[str, ...] = (),
    ) -> None:
        self.log = place / f"server-{len(list(place.glob('server-*')))}.log"
        [self.port] = free_ports(1)
        self.argv = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", "tiny", "--skip-tokenizer-init"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)),
            *("--block-size", str(BLOCK), "--max-model-len", "1024"),
            "--enable-prompt-tokens-details",
            *("--prefix-caching-hash-algo", "sha256_cbor", "--tensor-parallel-size", str(ranks)),
            *arguments,
        ]
        if tier is not None:
            extra = {
                "spec_name": "TieringOnCpu",
                "spec_module_path": "offloading_on_cpu",
                "cpu_bytes_to_use": 64 << 20,
                "secondary_tiers": [dict(tier)],
                **(options or {}),
            }
            transfer = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
            self.argv += ["--kv-transfer-config", json.dumps(transfer)]
        processors = sorted(os.sched_getaffinity(0))
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # Otherwise its two other processes import for nine seconds each what it has imported.
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",
            # Of KV events: whole hashes, and not 64 bits of them.
            "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
            # For the route that resets the prefix cache.
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(
                str(processors[rank % len(processors)]) for rank in range(ranks)
            ),
        }

    def shared_memory(self) -> set[Path]:
        """The CPU tier."""
        return set(map(Path, re.findall(r"/dev/shm/vllm_offload_\S+\.mmap", self.text())))

    def ask(self, tokens: list[int], **more: object) -> Answer:
        """Generate eight tokens, the most probable ones."""
        body = {
            "model": "tiny",
            "prompt": tokens,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "detokenize": False,
            **more,
        }
        answer = json.loads(self.call("POST", "/v1/completions", body))
        details = answer["usage"]["prompt_tokens_details"] or {}
        return Answer(tuple(answer["choices"][0]["token_ids"]), details.get("cached_tokens", 0))

    def forget(self) -> None:
        """Reset the prefix cache and the CPU tier; what is stored stays."""
        self.call("POST", "/reset_prefix_cache?reset_external=true")

    def wait_until_stored(self, pages: int) -> None:
        """Until that many pages were written by this process."""
        self.wait_for(
            lambda: self.counted("hicache_storage_written_pages_total") >= pages,
            f"{pages} pages are not stored",
        )


def write(place: Path, *, config: dict[str, object] = CONFIG) -> Path:
    """Write the model; return its directory."""
    write_model(place, seed=1, config=config)
    return place
