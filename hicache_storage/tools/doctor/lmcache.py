"""Checks of the command line of LMCache's server: what it and the bridge accept, and what is not
served as it is meant. What they refuse at their start they say themselves."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final

from hicache_storage.engines.lmcache.identity import VERSIONS
from hicache_storage.tools.doctor.engine_command import (
    SEED_VARIABLE,
    EngineCommand,
    check_version,
    object_of,
    read_object,
)
from hicache_storage.tools.doctor.finding import fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_storage.tools.doctor.finding import DoctorTarget, Finding

ADAPTER: Final = "--l2-adapter"
NAMES: Final = {
    "type": "plugin",
    "module_path": "hicache_storage.engines.lmcache",
    "class_name": "HiCacheL2Adapter",
}
"""What names the bridge in the value of `--l2-adapter`."""
EXAMPLE: Final = f"hicache doctor lmcache server {ADAPTER} '{json.dumps(NAMES)[:-1]}, ...}}'"


def check_lmcache(target: DoctorTarget) -> Iterator[Finding]:
    """Check version, keys and the configuration of the adapter."""
    command, check = EngineCommand.parse(target.command_line), "lmcache: adapter"
    yield from check_version("lmcache", ("lmcache",), VERSIONS)
    yield _keys(command)
    if not command.configurations(ADAPTER):
        yield warn(check, f"no {ADAPTER} was given; none was checked", EXAMPLE)
        return
    try:
        adapters = _adapters(command)
    except ValueError as error:
        yield fail(f"lmcache: {ADAPTER}", str(error), "write it as JSON, in single quotes")
        return
    if not adapters:
        yield fail(check, f"no {ADAPTER} names the bridge", EXAMPLE)
    for adapter in adapters:
        if adapter.get("serde") is None:
            yield ok(check, f"driver {object_of(adapter, 'adapter_params').get('driver')}")
        else:
            detail = (
                "serde: the length of what LMCache transforms is not known at a lookup, and none of "
                "it is stored"
            )
            yield fail(check, detail, "remove serde")
    if len(adapters) > 1:
        detail = f"{len(adapters)} name the bridge; the first one's store was opened"
        yield warn(check, detail, "one")


def adapter_options(target: DoctorTarget) -> dict[str, object]:
    """Return the bridge's options, as they are given; empty if there are none."""
    try:
        ours = _adapters(EngineCommand.parse(target.command_line))
    except ValueError:
        return {}
    return object_of(ours[0], "adapter_params") if ours else {}


def _adapters(command: EngineCommand) -> list[dict[str, object]]:
    """Return the values that name the bridge.

    Raises:
        ValueError: a value is no JSON object.
    """
    return [
        adapter
        for adapter in map(read_object, command.configurations(ADAPTER))
        if any(adapter.get(key) == NAMES[key] for key in ("module_path", "class_name"))
    ]


def _keys(command: EngineCommand) -> Finding:
    """Check that another server, or this one after a restart, makes the same keys."""
    check, seed = "lmcache: keys", os.environ.get(SEED_VARIABLE)
    algorithm = command.value("--hash-algorithm", default="blake3")
    fix = "--hash-algorithm blake3, the default, which needs no seed"
    if algorithm == "blake3":
        tokens = command.number("--chunk-size", default=256)
        return ok(check, f"{algorithm}, which needs no seed; chunks of {tokens} tokens")
    if algorithm in ("sha256_cbor", "sha256_cbor_64bit"):
        detail = (
            f"is vLLM's, begins with {SEED_VARIABLE} ({seed or 'not set'}), and becomes Python's own "
            "hash where the server has no vLLM"
        )
        return warn(check, f"{algorithm} {detail}", fix)
    detail = (
        f"is Python's own hash, whose values differ in each process, with {SEED_VARIABLE} too: "
        "nothing is found after a restart"
    )
    return fail(check, f"{algorithm!r} {detail}", fix)
