"""Effects of importing and constructing a driver, observed in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

from hicache_conformance.harness.process_state import unchanged_globals
from hicache_conformance.model.case import Inconclusive
from hicache_storage.hookspecs import ENTRY_POINT_GROUP
from hicache_storage.plugins import create_storage, discover, registry
from hicache_storage.spec import StorageIdentity

if TYPE_CHECKING:
    from collections.abc import Mapping

PROBE_SECONDS: Final = 120
ENGINES: Final = ("sglang", "vllm", "lmcache")
LAZY: Final = ("torch", *ENGINES)
"""What the plugin module, which is imported for every `hicache drivers`, must not import."""


def probe(driver: str, config: Mapping[str, object]) -> str:
    """Import and construct a driver in a process of its own.

    What it did that it must not, or nothing.
    """
    # `sys.path` of this process, so that the child finds the driver wherever this process did.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.run(
        [sys.executable, "-m", "hicache_conformance.harness.import_probe"],
        input=json.dumps(
            {"driver": driver, "owner": registry().owners[driver], "config": dict(config)},
            default=str,
        ),
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROBE_SECONDS,
        check=False,
    )
    lines = child.stdout.splitlines()
    if child.returncode or not lines:
        return f"ended a fresh process with status {child.returncode}: {child.stderr[-500:]}"
    answer: dict[str, str] = json.loads(lines[-1])
    if "unknown" in answer:
        raise Inconclusive(f"a fresh process cannot find the driver: {answer['unknown']}")
    return answer["found"]


def _look(driver: str, owner: str, config: dict[str, Any]) -> dict[str, str]:
    # Its own plugin alone: what another one imports is not this driver's doing.
    points = [
        point
        for point in entry_points(group=ENTRY_POINT_GROUP)
        if point.dist and f"{point.dist.name}:{point.name}" == owner
    ]
    if driver not in discover(points).drivers:
        return {"unknown": f"no entry point {owner} registers it there"}
    # Looked at before anything is constructed, since construction may import what it needs.
    heavy = [name for name in LAZY if name in sys.modules]
    if heavy:
        return {
            "found": f"imports {', '.join(heavy)} when drivers are only listed; do that in the "
            f"module of the target"
        }
    connections = list[str]()
    # An audit hook sees every connection, by whatever library; it cannot be removed, which a
    # process of its own makes harmless.
    sys.addaudithook(
        lambda event, arguments: connections.append(event) if event in _CONNECTING else None
    )
    identity = StorageIdentity(model="m", kv_dtype="bfloat16", page_size=2, layout="page_first")
    with unchanged_globals() as changed:
        create_storage(driver, identity, config)
    found = list[str]()
    if connections:
        found.append(f"connects ({', '.join(dict.fromkeys(connections))})")
    engines = [name for name in ENGINES if name in sys.modules]
    if engines:
        found.append(f"imports an engine ({', '.join(engines)})")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found.append("initialises CUDA")
    if changed:
        found.append(f"changes {', '.join(changed)}")
    return {"found": " and ".join(found)}


_CONNECTING: Final = (
    "socket.connect",
    "socket.bind",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.sendto",
)


if __name__ == "__main__":
    print(json.dumps(_look(**json.load(sys.stdin))))
