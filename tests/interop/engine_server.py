"""SGLang's own server, a process of its own that runs on the CPU, started by the command of the
quick start.

Its scheduler, radix tree, cache controller and HTTP server are SGLang's. What stands in for CUDA
kernels lies in `stand_in/`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import pytest

from hicache_conformance.harness.ports import free_ports
from tests.docs.blocks import blocks, steps
from tests.interop import tiny_model
from tests.interop.server_process import WAIT_SECONDS, ServerProcess, counted
from tests.interop.tiny_model import LLAMA, write_model

ROOT = Path(__file__).parents[2]
QUICK_START = ROOT / "docs" / "quickstart-engine.md"
STAND_IN = Path(__file__).parent / "stand_in"
PAGE_SIZE = 16
PAGES = 24
"""Of a prompt."""
REUSED = PAGES * PAGE_SIZE
MAX_STARTS = 3
ADMIN_KEY = "key"
ON_CPU = (
    f"--device cpu --attention-backend torch_native --dtype float32 --max-total-tokens 4096 "
    f"--page-size {PAGE_SIZE} "
    # A machine that is busy would else be answered with what has come in time; and a server that
    # waits keeps it busy.
    "--hicache-storage-prefetch-policy wait_complete --sleep-on-idle"
)


@dataclass(frozen=True)
class Answer:
    """What the server generated, and where it had the prompt's KV from, in tokens."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int
    from_storage: int

    def says(self, other: Answer) -> bool:
        """Whether it is the other's answer, to the rounding of the arithmetic."""
        near = all(abs(a - b) < 1e-3 for a, b in zip(self.logprobs, other.logprobs, strict=True))
        return self.tokens == other.tokens and near


def check_restored(again: Answer, first: Answer) -> None:
    """Check that all pages of a prompt came from storage, and gave the answer without any."""
    assert first.cached == 0
    assert (again.cached, again.from_storage) == (REUSED, REUSED)
    assert again.says(first)


def prompt(number: int) -> list[int]:
    """Pages of tokens and a few more; prompts of another number share none."""
    return tiny_model.prompt(number, REUSED)


def prepare_engine(
    place: Path, *, ranks: int, config: dict[str, object] = LLAMA, **options: str
) -> list[str]:
    """Write a model and the quick start's configuration; return the command that starts SGLang."""
    write_model(place / "model", seed=1, config=config)
    write_configuration(place, ranks=ranks)
    return quick_start_command(place / "model", **options)


def write_configuration(place: Path, *, ranks: int) -> dict[str, object]:
    """Do the quick start's step of writing `hicache.json` in `place`, and add a port for the
    metrics of each rank.

    Returns:
        What the file then holds; rank `r` has its metrics at port `metrics_port + r`.
    """
    for start in ("mkdir -p cache", "cat > hicache.json"):
        subprocess.run(["bash", "-ec", quick_start_step(start)], cwd=place, check=True)
    file = place / "hicache.json"
    configuration = json.loads(file.read_text()) | {
        "metrics_port": free_ports(ranks)[0],
        "metrics_host": "127.0.0.1",
    }
    file.write_text(json.dumps(configuration))
    return configuration


def quick_start_step(start: str) -> str:
    """The quick start's only command that begins so."""
    consoles = [block for block in blocks(QUICK_START) if block.language == "console"]
    commands = [step.command for block in consoles for step in steps(block.text)]
    [command] = [each for each in commands if each.startswith(start)]
    return command


def quick_start_command(
    model: Path, *, layout: str = "page_first", io_backend: str = "kernel"
) -> list[str]:
    """The quick start's command that starts SGLang, for this model; its host pools may have another
    layout than there."""
    command = quick_start_step("sglang serve ")
    words = {"MODEL": str(model), "page_first": layout}
    return [words.get(word, word) for word in shlex.split(command.replace("\\\n", " "))] + [
        "--hicache-io-backend",
        io_backend,
    ]


def other_models(served: str, python: Path) -> list[str]:
    """SGLang's models but the one served, which it would import on every start, for five
    seconds."""
    packages = python.parents[1].glob("lib/python*/site-packages/sglang/srt/models")
    modules = pkgutil.iter_modules(map(str, packages))
    return [module.name for module in modules if module.name != served]


class EngineServer(ServerProcess):
    """The server in a directory that has its configuration; left to nobody when the block ends.

    Args:
        place: the directory.
        command: the one that starts it.
        ranks: of tensor parallelism.
        replicas: of plain DP.
        python: of an environment that has SGLang; the one that runs if not given.
        options: what to add to the command, which may be other values of what it has anyway.
    """

    headers: ClassVar = {"Authorization": f"Bearer {ADMIN_KEY}"}
    ready = "/health_generate"

    def __init__(
        self,
        place: Path,
        command: list[str],
        *,
        ranks: int,
        replicas: int = 1,
        options: str = "",
        python: Path = Path(sys.executable),
    ) -> None:
        self.starts = 0
        self.place, self.log = place, place / f"server-{len(list(place.glob('server-*')))}.log"
        [self.port] = free_ports(1)
        [program, *arguments] = command
        self.argv = [
            *(str(python), str(python.with_name(program)), *arguments),
            *shlex.split(ON_CPU),
            "--admin-api-key",
            ADMIN_KEY,
            "--enable-cache-report",
        ]
        self.argv += ["--host", "127.0.0.1", "--port", str(self.port), "--tp-size", str(ranks)]
        self.argv += ["--dp-size", str(replicas), *shlex.split(options)]
        self.ranks = ranks * replicas
        self.model = json.loads(
            Path(command[command.index("--model-path") + 1], "config.json").read_text()
        )["model_type"]
        # The processor of each rank; SGLang would give each a NUMA node.
        processors = itertools.islice(itertools.cycle(sorted(os.sched_getaffinity(0))), self.ranks)
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, processors)),
            "SGLANG_DISABLED_MODEL_ARCHS": ",".join(other_models(self.model, python)),
            "HF_HUB_OFFLINE": "1",
        }

    def __enter__(self) -> Self:
        self.starts += 1
        # Sockets lie in it, whose paths are short by law.
        self.temporary = tempfile.TemporaryDirectory(prefix="sglang-")
        self.environment["TMPDIR"] = self.temporary.name
        return super().__enter__()

    def kill(self) -> None:
        """To be asked to end takes SGLang seconds, and less would be lost."""
        super().kill()
        self.temporary.cleanup()

    def shared_memory(self) -> set[Path]:
        """What its processes have mapped."""
        found = set[Path]()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.getpgid(int(process.name)) == self.process.pid:
                    found |= {
                        Path(name)
                        for name in re.findall(r"/dev/shm/sgl\S+", (process / "maps").read_text())
                    }
        return found

    def is_up(self) -> bool:
        """Whether it serves; started again where its port was taken before it listened.

        SGLang binds it seconds after it was chosen, and takes other ports in its neighbourhood.
        Without it, it hangs while it ends.
        """
        lost = "error while attempting to bind on address" in self.text()
        if lost and self.starts < MAX_STARTS:
            self.kill()
            [port] = free_ports(1)
            self.argv = [str(port) if part == str(self.port) else part for part in self.argv]
            self.port = port
            self.__enter__()
        return super().is_up()

    def ask(self, prompt: list[int], **more: object) -> Answer:
        """Generate eight tokens."""
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, **more}
        answer = json.loads(self.call("POST", "/generate", body))
        told = answer["meta_info"]
        return Answer(
            tuple(answer["output_ids"]),
            tuple(logprob for logprob, *_ in told["output_token_logprobs"]),
            told["cached_tokens"],
            (told["cached_tokens_details"] or {}).get("storage", 0),
        )

    def counted(self, what: str, **labels: str) -> list[int]:
        """A counter of pages of each rank's bridge, as Prometheus reads it."""
        name, first = f"hicache_storage_{what}_pages_total", self._first_metrics_port()
        texts = [self._metrics_at(first + rank) for rank in range(self.ranks)]
        return [int(counted(text, name, **labels)) for text in texts]

    def metrics(self) -> str:
        """What rank 0's bridge answers Prometheus."""
        return self._metrics_at(self._first_metrics_port())

    def _first_metrics_port(self) -> int:
        return json.loads((self.place / "hicache.json").read_text())["metrics_port"]

    def _metrics_at(self, port: int) -> str:
        url = f"http://127.0.0.1:{port}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=WAIT_SECONDS) as answer:
                return answer.read().decode()
        except OSError as error:
            pytest.fail(f"no metrics at {url}: {error}\n{self.text()[-6000:]}")

    def flush(self) -> None:
        """Forget what is on the device and in host memory, as soon as nothing runs; what is stored
        stays."""
        self.call("POST", f"/flush_cache?timeout={WAIT_SECONDS}")

    def update_weights(self, model: Path, version: str) -> None:
        """Serve another model of the same shape under the same name."""
        self.call(
            "POST",
            "/update_weights_from_disk",
            {"model_path": str(model), "weight_version": version},
        )

    def detach(self) -> None:
        """Go on without storage, as soon as nothing runs."""
        self.wait_for(self._has_detached, "the scheduler is never idle")

    def _has_detached(self) -> bool:
        try:
            self.call("DELETE", "/hicache/storage-backend")
        except urllib.error.HTTPError as error:
            # SGLang answers a request a moment before its scheduler is idle.
            said = error.read().decode()
            if "scheduler is not idle" not in said:
                pytest.fail(f"{said}\n{self.text()[-6000:]}")
            return False
        return True

    def attach(self, configuration: dict[str, object]) -> str:
        """Begin to use a storage while the server runs; what SGLang says to it."""
        body = {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config_json": json.dumps(configuration),
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        return self.call("PUT", "/hicache/storage-backend", body)
