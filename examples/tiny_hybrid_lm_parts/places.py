"""The stores that the example uses: of any installed driver, thrown away at the end unless options
say where they are."""

from __future__ import annotations

import json
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING

from hicache_storage.hybrid import StorageConfig
from hicache_storage.plugins import create_storage, registry
from hicache_storage.spec import Durability, PoolName, StorageIdentity

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

TMP = "{tmp}"
PORT = "{port:"


@contextmanager
def servers(driver: str, folder: Path) -> Generator[Mapping[str, int]]:
    """Run the servers that a driver registers for a throwaway store; their ports by name. Needs the
    conformance suite."""
    from hicache_conformance.injectors.servers import Servers

    services = Servers(registry().get(driver).trial_services, folder)
    try:
        services.start()
        yield services.ports
    finally:
        services.close()


def store(
    driver: str, given: Mapping[str, str], folder: Path, model: str, ports: Mapping[str, int]
) -> StorageConfig:
    """A store of a driver in an empty directory.

    The options are those that the driver registers for a throwaway store, except addresses of
    servers that do not run.

    Args:
        given: options that take precedence.
        ports: of servers that run, by name.
    """
    options: dict[str, object] = {}
    for name, text in registry().get(driver).trial_config.items():
        filled = text.replace(TMP, str(folder))
        for port, number in ports.items():
            filled = filled.replace(f"{PORT}{port}}}", str(number))
        if PORT not in filled:
            options[name] = filled
    return StorageConfig(driver=driver, model=model, options=options | dict(given))


def lasts(storage: StorageConfig) -> bool:
    """Return True if a second process finds the pages of a first one, while the servers run."""
    identity = StorageIdentity(model="any", kv_dtype="any", page_size=1, layout="any")
    made = create_storage(storage.driver, identity, storage.options)
    return made.capabilities.durability is not Durability.NONE


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
