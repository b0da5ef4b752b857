"""Checks of the command line of LMCache's server; nothing of LMCache is imported."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Final

from hicache_storage.engines.lmcache.identity import VERSIONS, adapter_config
from hicache_storage.tools.doctor.engine_command import (
    CUDA_NODES,
    SEED_VARIABLE,
    SHARED_MEMORY,
    EngineCommand,
    check_version,
    has_device,
    is_file,
    object_of,
    parsed_bridge,
    read_object,
)
from hicache_storage.tools.doctor.finding import fail, ok, warn
from hicache_storage.tools.doctor.machine import size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hicache_storage.tools.doctor.finding import DoctorTarget, Finding

ADAPTER: Final = "--l2-adapter"
NAMES: Final = {
    "type": "plugin",
    "module_path": "hicache_storage.engines.lmcache",
    "class_name": "HiCacheL2Adapter",
}
"""What names the bridge in the value of `--l2-adapter`."""
EXAMPLE: Final = f"hicache doctor lmcache server {ADAPTER} '{json.dumps(NAMES)[:-1]}, ...}}'"
NO_ARENA: Final = ("--gds-l1-path", "--l1-manager")
"""Options with which L1 may be no arena in this process' memory."""


def check_lmcache(target: DoctorTarget) -> Iterator[Finding]:
    """Check version, keys, transfer mode, L1 and the configuration of the adapter."""
    command = EngineCommand.parse(target.command_line)
    yield from check_version("lmcache", ("lmcache",), VERSIONS)
    yield from _keys(command)
    if "server" in command.arguments:
        yield from _transfer(command)
        yield from _l1(command)
    texts = command.configurations(ADAPTER)
    if not texts:
        yield warn("lmcache: adapter", f"no {ADAPTER} was given; none was checked", EXAMPLE)
        return
    found = 0
    for text in texts:
        try:
            adapter = read_object(text)
        except (OSError, ValueError) as error:
            yield fail(f"lmcache: {ADAPTER}", str(error), "write it as JSON, in single quotes")
            return
        if is_file(text):
            fix = f'{ADAPTER} "$(cat {text})"'
            yield warn(f"lmcache: {ADAPTER}", f"read from {text}; LMCache takes JSON, no file", fix)
        if _is_ours(adapter):
            found += 1
            yield from _adapter(adapter)
    if not found:
        yield fail("lmcache: adapter", f"no {ADAPTER} names the bridge", EXAMPLE)
    elif found > 1:
        yield warn(
            "lmcache: adapter", f"{found} name the bridge; the first one's store was opened", "one"
        )


def adapter_options(target: DoctorTarget) -> dict[str, object]:
    """Return the bridge's options, as they are given; empty if there are none."""
    for text in EngineCommand.parse(target.command_line).configurations(ADAPTER):
        try:
            adapter = read_object(text)
        except (OSError, ValueError):
            return {}
        if _is_ours(adapter):
            return object_of(adapter, "adapter_params")
    return {}


def _is_ours(adapter: Mapping[str, object]) -> bool:
    return any(adapter.get(key) == NAMES[key] for key in ("module_path", "class_name"))


def _adapter(adapter: Mapping[str, object]) -> Iterator[Finding]:
    """Check the value that names the bridge."""
    check = "lmcache: adapter"
    for key, right in NAMES.items():
        if adapter.get(key) != right:
            yield fail(check, f"{key} is {adapter.get(key)!r}", f'"{key}": "{right}"')
    if "driver" in adapter:
        yield fail(
            check,
            "driver stands beside type, where LMCache ignores it",
            '"adapter_params": {"driver": ..., "driver_config": {...}}',
        )
        return
    if adapter.get("serde") is not None:
        yield fail(
            check,
            "serde: the length of what LMCache transforms is not known at a lookup, and none of it "
            "is stored",
            "remove serde",
        )
    _, finding = parsed_bridge(check, adapter_config, object_of(adapter, "adapter_params"))
    yield finding


def _keys(command: EngineCommand) -> Iterator[Finding]:
    """Check that another server, or this one after a restart, makes the same keys."""
    check, seed = "lmcache: keys", os.environ.get(SEED_VARIABLE)
    algorithm = command.value("--hash-algorithm", default="blake3")
    tokens = command.number("--chunk-size", default=256)
    fix = "--hash-algorithm blake3, the default, which needs no seed"
    if algorithm == "blake3":
        yield ok(check, f"{algorithm}, which needs no seed; chunks of {tokens} tokens")
    elif algorithm in ("sha256_cbor", "sha256_cbor_64bit"):
        yield warn(
            check,
            f"{algorithm} is vLLM's, begins with {SEED_VARIABLE} ({seed or 'not set'}), and becomes "
            "Python's own hash where the server has no vLLM",
            fix,
        )
    else:
        yield fail(
            check,
            f"{algorithm!r} is Python's own hash, whose values differ in each process, with "
            f"{SEED_VARIABLE} too: nothing is found after a restart",
            fix,
        )


def _transfer(command: EngineCommand) -> Iterator[Finding]:
    """Check that the server answers the requests that the engine's workers make."""
    check = "lmcache: transfer mode"
    mode = command.value("--supported-transfer-mode", default="lmcache_driven")
    serves_handles = has_device(*CUDA_NODES, "davinci[0-9]*")
    if mode == "lmcache_driven" and not serves_handles:
        yield fail(
            check,
            "lmcache_driven, and workers on CPUs ask for engine_driven: the server logs `No handler "
            "registered`, and vLLM hangs at its start",
            "--supported-transfer-mode engine_driven, or auto",
        )
    elif mode == "engine_driven" and serves_handles:
        yield warn(
            check,
            "engine_driven, and workers on CUDA or NPUs ask for lmcache_driven",
            "--supported-transfer-mode auto; or in kv_connector_extra_config of the engine "
            '"lmcache.mp.mp_transfer_mode": "engine_driven"',
        )
    else:
        yield ok(check, mode)


def _l1(command: EngineCommand) -> Iterator[Finding]:
    """Check that L1 is an arena in main memory, and fits."""
    check = "lmcache: L1"
    if option := command.given(*NO_ARENA):
        detail = f"{option}: the bridge reads and writes in an L1 of main memory"
        fix = "--l1-size-gb SIZE --eviction-policy LRU in its place"
        if option == "--gds-l1-path":
            yield fail(check, detail, fix)
        else:
            yield warn(check, f"{detail}; of type DRAM, which was not checked", fix)
        return
    missing = [name for name in ("--l1-size-gb", "--eviction-policy") if not command.given(name)]
    if missing:
        fix = "--l1-size-gb 20 --eviction-policy LRU"
        yield fail(check, f"{' and '.join(missing)} missing: the server does not start", fix)
        return
    try:
        wanted = int(float(command.value("--l1-size-gb")) * (1 << 30))
    except ValueError:
        yield fail(check, "--l1-size-gb is no number", "--l1-size-gb 20")
        return
    if command.value("--shm-name") and wanted > (free := shutil.disk_usage(SHARED_MEMORY).free):
        yield fail(
            check,
            f"--shm-name puts {size(wanted)} into {SHARED_MEMORY}, which has {size(free)} free",
            f"mount -o remount,size={-(-wanted >> 30)}G {SHARED_MEMORY} (containers: --shm-size or "
            "--ipc=host), or a smaller --l1-size-gb",
        )
    else:
        yield ok(check, size(wanted))
