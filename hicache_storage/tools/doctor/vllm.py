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
    yield _connector(transfer, extra, command)
    yield from _tiers(extra, command)


def tier_options(target: DoctorTarget) -> dict[str, object]:
    """Return the bridge's options, as they are given; empty if there are none."""
    entries = _entries(connector_options(target))
    ours = [_own(entry) for entry in entries if _is_ours(entry)]
    return ours[0] if ours else {}


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
        for connector in _objects(extra.get("connectors")):
            if connector.get("kv_connector") == CONNECTOR:
                return object_of(connector, "kv_connector_extra_config")
    return extra


def _objects(value: object) -> list[dict[str, object]]:
    found = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("dict[str, object]", each) for each in found if isinstance(each, dict)]


def _entries(extra: Mapping[str, object]) -> list[dict[str, object]]:
    return _objects(extra.get("secondary_tiers"))


def _is_ours(entry: Mapping[str, object]) -> bool:
    return any(entry.get(key) == value for key, value in TIER.items())


def _own(entry: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in entry.items() if name not in ENGINE_KEYS}


def _keys(command: EngineCommand) -> Finding:
    """Check that another process, or this one after a restart, makes the same keys."""
    check, seed = "vllm: keys", os.environ.get(SEED_VARIABLE)
    algorithm = command.value("--prefix-caching-hash-algo", default="sha256")
    by_cbor = "--prefix-caching-hash-algo sha256_cbor"
    if algorithm == "sha256_cbor":
        return ok(check, f"{algorithm}, {_seed(seed)}")
    if not algorithm.startswith("xxhash"):
        detail = "hashes what Python pickles, which another version of Python may do otherwise"
        return warn(check, f"{algorithm} {detail}; {_seed(seed)}", by_cbor)
    if seed is None:
        detail = "keys are random in each process, and nothing is found after a restart or by another engine"
        return fail(check, f"{algorithm} without {SEED_VARIABLE}: {detail}", by_cbor)
    detail = "is not collision resistant, and its seed is known: a prompt can be made to be answered with another one's KV"
    return warn(check, f"{algorithm} {detail}", by_cbor)


def _seed(seed: str | None) -> str:
    if seed is None:
        return "vLLM's fixed seed"
    return f"seed {SEED_VARIABLE}={seed}, which has to be the same for every engine and restart"


def _connector(
    transfer: Mapping[str, object], extra: Mapping[str, object], command: EngineCommand
) -> Finding:
    """Check that the connector has secondary tiers."""
    check, name, spec = "vllm: connector", transfer.get("kv_connector"), extra.get("spec_name")
    if name == "LMCacheMPConnector":
        return fail(
            check,
            "LMCacheMPConnector leads to LMCache's server, which has no secondary tiers",
            "hicache doctor lmcache server ..., with that server's command line",
        )
    if name not in (CONNECTOR, "MultiConnector") and not command.given("--kv-offloading-size"):
        detail = f"kv_connector is {name!r}; secondary tiers are of {CONNECTOR}"
        return fail(check, detail, f'"kv_connector": "{CONNECTOR}"')
    if spec is None:
        detail = "no spec_name: vLLM takes CPUOffloadingSpec, which ignores secondary_tiers"
        return fail(check, detail, f'"spec_name": "{SPEC}" in kv_connector_extra_config')
    return ok(check, f"{name}, {spec}")


def _tiers(extra: Mapping[str, object], command: EngineCommand) -> Iterator[Finding]:
    """Check the entry that names the bridge, its options, and what they mean for hits."""
    check = "vllm: tier"
    entries = _entries(extra)
    ours = [_own(entry) for entry in entries if _is_ours(entry)]
    if not ours:
        kinds = ", ".join(str(entry.get("type")) for entry in entries) or "no tier"
        fix = f'"secondary_tiers": [{json.dumps({**TIER, "driver": "file"})}]'
        yield fail(check, f"secondary_tiers has {kinds}, and not the bridge", fix)
        return
    if len(ours) > 1:
        yield warn(check, f"{len(ours)} entries name the bridge; the first was checked", "one each")
    yield ok(check, f"driver {ours[0].get('driver')}")
    yield _generated(extra)
    yield from _sharing(extra, ours[0], command)
    yield _weights(ours[0], command)


def _generated(extra: Mapping[str, object]) -> Finding:
    check, prompts = "vllm: generated tokens", extra.get("offload_prompt_only")
    if prompts is None:
        return warn(
            check,
            "offload_prompt_only is true by default: answers are not stored, and the next turn of a "
            "chat computes them again",
            '"offload_prompt_only": false in kv_connector_extra_config; true says that it is meant',
        )
    return ok(check, "not stored, as offload_prompt_only says" if prompts else "stored")


def _sharing(
    extra: Mapping[str, object], tier: Mapping[str, object], command: EngineCommand
) -> Iterator[Finding]:
    """Report what separates the pages of engines, and what should and does not."""
    ranks = command.number("--tensor-parallel-size", "-tp", default=1)
    canonical = extra.get("canonical_layout")
    alone = "TP sizes share, by canonical_layout" if canonical else "no other TP size shares"
    yield ok("vllm: sharing", f"TP {ranks}; {alone}")
    if (option := command.given(*CHANGES_KV)) and not (tier.get("revision") or tier.get("salt")):
        yield warn(
            "vllm: sharing",
            f"{option} changes the KV of a prompt, and vLLM tells a tier nothing of it: an engine "
            "without it is served this one's pages",
            f'"revision": "{option.lstrip("-")} {command.value(option)[:40]}" beside "driver"',
        )


def _weights(tier: Mapping[str, object], command: EngineCommand) -> Finding:
    check = "vllm: weights"
    if tier.get("on_reset") == "keep":
        return ok(check, "on_reset keep: pages are served whatever the weights are by then")
    if command.given("--enable-sleep-mode"):
        return warn(
            check,
            "on_reset is miss, and vLLM resets its caches when it sleeps: nothing is served from "
            "then on",
            '"on_reset": "keep" beside "driver", if the weights stay the same',
        )
    return ok(check, "on_reset miss: nothing is served after a reset, until a restart")
