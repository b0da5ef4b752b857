"""Checks of vLLM's command line: what vLLM and the bridge accept, and what is not served as it is
meant. What they refuse at their start they say themselves; nothing of vLLM is imported."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final, cast

from hicache_storage.engines.vllm.identity import DISTRIBUTIONS, ENGINE_KEYS, VERSIONS
from hicache_storage.tools.doctor.engine_command import (
    SEED_VARIABLE,
    EngineCommand,
    check_version,
    object_of,
    read_object,
)
from hicache_storage.tools.doctor.finding import fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hicache_storage.tools.doctor.finding import DoctorTarget, Finding

TRANSFER: Final = "--kv-transfer-config"
CONNECTOR, SPEC = "OffloadingConnector", "TieringOffloadingSpec"
TIER: Final = {"type": "HiCacheTier", "module_path": "hicache_storage.engines.vllm"}
"""What names the bridge in an entry of `secondary_tiers`."""
EXAMPLE: Final = (
    f"hicache doctor vllm serve MODEL {TRANSFER} "
    '\'{"kv_connector": "OffloadingConnector", ...}\', as on the page of vLLM\'s bridge'
)
CHANGES_KV: Final = (
    *("--quantization", "-q", "--hf-overrides", "--attention-backend", "--revision"),
    "--code-revision",
)
"""Options that change the KV of a prompt, and of which vLLM tells a tier nothing."""


def check_vllm(target: DoctorTarget) -> Iterator[Finding]:
    """Check version, keys and the configuration of the tier."""
    command = EngineCommand.parse(target.command_line)
    yield from check_version("vllm", DISTRIBUTIONS, VERSIONS)
    yield _keys(command)
    texts = command.configurations(TRANSFER)
    if not texts:
        yield warn("vllm: tier", f"no {TRANSFER} was given; none was checked", EXAMPLE)
        return
    try:
        transfer = read_object(texts[-1])
    except ValueError as error:
        yield fail(f"vllm: {TRANSFER}", str(error), "write it as JSON, in single quotes")
        return
    extra = _extra(transfer)
    yield from _connector(transfer, extra, command)
    yield from _tier(extra, command)


def tier_options(target: DoctorTarget) -> dict[str, object]:
    """Return the bridge's options, as they are given; empty if there are none."""
    return next(iter(_tiers(connector_options(target))), dict[str, object]())


def connector_options(target: DoctorTarget) -> dict[str, object]:
    """Return the options of the offloading connector; empty if there are none."""
    texts = EngineCommand.parse(target.command_line).configurations(TRANSFER)
    try:
        return _extra(read_object(texts[-1])) if texts else {}
    except ValueError:
        return {}


def _extra(transfer: Mapping[str, object]) -> dict[str, object]:
    """Return the options of the offloading connector, alone or among several."""
    extra = object_of(transfer, "kv_connector_extra_config")
    if transfer.get("kv_connector") == "MultiConnector":
        for connector in _objects(extra, "connectors"):
            if connector.get("kv_connector") == CONNECTOR:
                return object_of(connector, "kv_connector_extra_config")
    return extra


def _objects(options: Mapping[str, object], name: str) -> list[dict[str, object]]:
    value = options.get(name)
    found = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("dict[str, object]", each) for each in found if isinstance(each, dict)]


def _tiers(extra: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the bridge's own options in each entry that names it."""
    return [
        {name: value for name, value in entry.items() if name not in ENGINE_KEYS}
        for entry in _objects(extra, "secondary_tiers")
        if any(entry.get(key) == value for key, value in TIER.items())
    ]


def _keys(command: EngineCommand) -> Finding:
    """Check that another process, or this one after a restart, makes the same keys."""
    check, seed = "vllm: keys", os.environ.get(SEED_VARIABLE)
    algorithm = command.value("--prefix-caching-hash-algo", default="sha256")
    by_cbor = "--prefix-caching-hash-algo sha256_cbor"
    seeded = "vLLM's fixed seed"
    if seed is not None:
        seeded = f"seed {SEED_VARIABLE}={seed}, which has to be the same for every engine"
    if algorithm == "sha256_cbor":
        return ok(check, f"{algorithm}, {seeded}")
    if not algorithm.startswith("xxhash"):
        detail = "hashes what Python pickles, which another version of Python may do otherwise"
        return warn(check, f"{algorithm} {detail}; {seeded}", by_cbor)
    if seed is None:
        detail = "keys are random in each process, and nothing is found after a restart or by another engine"
        return fail(check, f"{algorithm} without {SEED_VARIABLE}: {detail}", by_cbor)
    detail = "is not collision resistant, and its seed is known: a prompt can be made to be answered with another one's KV"
    return warn(check, f"{algorithm} {detail}", by_cbor)


def _connector(
    transfer: Mapping[str, object], extra: Mapping[str, object], command: EngineCommand
) -> Iterator[Finding]:
    """Check that the connector has secondary tiers."""
    check, name = "vllm: connector", transfer.get("kv_connector")
    if name == "LMCacheMPConnector":
        detail = "LMCacheMPConnector leads to LMCache's server, which has no secondary tiers"
        fix = "hicache doctor lmcache server ..., with that server's command line"
        yield fail(check, detail, fix)
    elif name not in (CONNECTOR, "MultiConnector") and not command.given("--kv-offloading-size"):
        detail = f"kv_connector is {name!r}; secondary tiers are of {CONNECTOR}"
        yield fail(check, detail, f'"kv_connector": "{CONNECTOR}"')
    elif extra.get("spec_name") is None:
        detail = "no spec_name: vLLM takes CPUOffloadingSpec, which ignores secondary_tiers"
        yield fail(check, detail, f'"spec_name": "{SPEC}" in kv_connector_extra_config')


def _tier(extra: Mapping[str, object], command: EngineCommand) -> Iterator[Finding]:
    """Check the entry that names the bridge, and what its options mean for hits."""
    check, ours = "vllm: tier", _tiers(extra)
    if not ours:
        kinds = [str(entry.get("type")) for entry in _objects(extra, "secondary_tiers")]
        detail = f"secondary_tiers has {', '.join(kinds) or 'no tier'}, and not the bridge"
        yield fail(check, detail, f'"secondary_tiers": [{json.dumps({**TIER, "driver": "file"})}]')
        return
    tier = ours[0]
    if len(ours) > 1:
        yield warn(check, f"{len(ours)} entries name the bridge; the first was checked", "one each")
    yield ok(check, f"driver {tier.get('driver')}")
    if extra.get("offload_prompt_only") is None:
        yield warn(
            "vllm: generated tokens",
            "offload_prompt_only is true by default: answers are not stored, and the next turn of a "
            "chat computes them again",
            '"offload_prompt_only": false in kv_connector_extra_config; true says that it is meant',
        )
    if (option := command.given(*CHANGES_KV)) and not (tier.get("revision") or tier.get("salt")):
        yield warn(
            "vllm: sharing",
            f"{option} changes the KV of a prompt, and vLLM tells a tier nothing of it: an engine "
            "without it is served this one's pages",
            f'"revision": "{option.lstrip("-")} {command.value(option)[:40]}" beside "driver"',
        )
    if command.given("--enable-sleep-mode") and tier.get("on_reset") != "keep":
        yield warn(
            "vllm: weights",
            "on_reset is miss, and vLLM resets its caches when it sleeps: nothing is served from "
            "then on",
            '"on_reset": "keep" beside "driver", if the weights stay the same',
        )
