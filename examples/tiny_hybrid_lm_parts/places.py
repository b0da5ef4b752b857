"""The stores that the example uses: of any installed driver, thrown away at the end unless options
say where they are."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING

from hicache_storage.plugins import registry
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def store(driver: str, given: Mapping[str, str], folder: Path) -> dict[str, object]:
    """Options of a driver for a store in an empty directory.

    They are those that the driver registers for a throwaway store, except addresses of servers,
    which `-c` gives.

    Args:
        given: options that take precedence.
    """
    options: dict[str, object] = {
        name: text.replace("{tmp}", str(folder))
        for name, text in registry().get(driver).trial_config.items()
        if "{port:" not in text
    }
    return options | dict(given)


def flip_a_bit(path: Path, seed: int) -> Path:
    """Damage one page of KV that the file driver keeps: the first in the file that was written
    first; returns the file."""
    (kv,) = (
        about.parent
        for about in path.rglob("namespace.json")
        if json.loads(about.read_text())["pool"] == PoolName.KV
    )
    bundles = sorted(kv.rglob("*.bundle"), key=lambda each: (each.stat().st_mtime_ns, each.name))
    with bundles[0].open("r+b") as bundle:
        at = Random(seed).randrange(64)
        bundle.seek(at)
        byte = bundle.read(1)[0]
        bundle.seek(at)
        bundle.write(bytes([byte ^ 0x40]))
    return bundles[0]
