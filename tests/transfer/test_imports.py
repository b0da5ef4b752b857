"""What copies need: on a GPU machine there may be torch, and little else."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_TORCH = """
import sys
import hicache_storage.transfer, hicache_storage.transfer.simulator, hicache_storage.pools.device
assert "torch" not in sys.modules, "torch was imported"
"""
WITH_TORCH_ALONE = """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("msgspec", "xxhash", "fastapi", "aiohttp", "prometheus_client", "typer", "rich"):
            raise ImportError(name)

sys.meta_path.insert(0, Nothing())
import hicache_storage.pools, hicache_storage.transfer, hicache_storage.transfer.simulator
for module in (hicache_storage.pools, hicache_storage.transfer):
    for name in module.__all__:
        getattr(module, name)
"""


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_naming_the_parts_needs_no_torch():
    run(WITHOUT_TORCH)


def test_using_them_needs_torch_alone():
    run(WITH_TORCH_ALONE)
