"""The code in the guide to stacks runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import torch

from hicache_storage.hybrid import DSAStackConfig, IndexerGeometry, MLAGeometry
from hicache_storage.hybrid.stack import StackConfig

GUIDE = (Path(__file__).parents[2] / "docs" / "hybrid-stack.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def test_the_code_of_the_guide_runs(tmp_path):
    code = BLOCKS[0].replace("/tmp/hicache", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "512\n"


def test_the_second_config_of_the_guide_is_one():
    names = {"DSAStackConfig": DSAStackConfig, "MLAGeometry": MLAGeometry, "IndexerGeometry": IndexerGeometry, "torch": torch}
    assert isinstance(eval(BLOCKS[1], names), DSAStackConfig)


def test_the_guide_names_every_field():
    assert [field.name for field in fields(StackConfig) if field.name not in GUIDE] == []
