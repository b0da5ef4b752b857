"""Checks of vLLM's command line: what vLLM and the bridge accept, and what is not served as it is
meant. What they refuse at their start they say themselves; nothing of vLLM is imported."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final, cast

from hicache_storage.engines.vllm.identity import (
    DISTRIBUTIONS,
    ENGINE_KEYS,
    VERSIONS,
    tier_config,
)
from hicache_storage.tools.doctor.engine_command import (
    SEED_VARIABLE,
    EngineCommand,
    check_version,
    object_of,
    parsed_bridge,
    read_object,
)
from hicache_storage.tools.doctor.finding import fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hicache_storage.engines.vllm.identity import TierConfig
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
    yield from _keys(command)
    texts = command.configurations(TRANSFER)
    if not texts:
        yield warn("vllm: tier", f"no {TRANSFER} was given; none was checked", EXAMPLE)
        return
    try:
        transfer = read_object(texts[-1])
    except (OSError, ValueError) as error:
        yield fail(f"vllm: {TRANSFER}", str(error), "write it as JSON, in single quotes")
        return
    extra = _extra(transfer)
    yield from _connector(transfer, extra, command)
    yield from _tiers(extra, command)


def tier_options(target: DoctorTarget) -> dict[str, object]:
    """Return the bridge's options, as they are given; empty if there are none."""
    texts = EngineCommand.parse(target.command_line).configurations(TRANSFER)
    try:
        entries = _entries(_extra(read_object(texts[-1]))) if texts else []
    except (OSError, ValueError):
        return {}
    ours = [_own(entry) for entry in entries if _is_ours(entry)]
    return ours[0] if ours else {}


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


# Keys
# --------------------------------------------------------------------------------------------------


def _keys(command: EngineCommand) -> Iterator[Finding]:
    """Check that another process, or this one after a restart, makes the same keys."""
    check, seed = "vllm: keys", os.environ.get(SEED_VARIABLE)
    algorithm = command.value("--prefix-caching-hash-algo", default="sha256")
    by_cbor = "--prefix-caching-hash-algo sha256_cbor"
    if algorithm.startswith("xxhash") and seed is None:
        yield fail(
            check,
            f"{algorithm} without {SEED_VARIABLE}: keys are random in each process, and nothing is "
            "found after a restart or by another engine",
            by_cbor,
        )
    elif algorithm.startswith("xxhash"):
        yield warn(
            check,
            f"{algorithm} is not collision resistant, and its seed is known: a prompt can be made "
            "to be answered with another one's KV",
            by_cbor,
        )
    elif algorithm == "sha256_cbor":
        yield ok(check, f"{algorithm}, {_seed(seed)}")
    else:
        yield warn(
            check,
            f"{algorithm} hashes what Python pickles, which another version of Python may do "
            f"otherwise; {_seed(seed)}",
            by_cbor,
        )


def _seed(seed: str | None) -> str:
    if seed is None:
        return "vLLM's fixed seed"
    return f"seed {SEED_VARIABLE}={seed}, which has to be the same for every engine and restart"


# Connector
# --------------------------------------------------------------------------------------------------


def _connector(
    transfer: Mapping[str, object], extra: Mapping[str, object], command: EngineCommand
) -> Iterator[Finding]:
    """Check that the connector has secondary tiers."""
    check, name, spec = "vllm: connector", transfer.get("kv_connector"), extra.get("spec_name")
    offloads = name in (CONNECTOR, "MultiConnector") or command.given("--kv-offloading-size")
    if name == "LMCacheMPConnector":
        yield fail(
            check,
            "LMCacheMPConnector leads to LMCache's server, which has no secondary tiers",
            "hicache doctor lmcache server ..., with that server's command line",
        )
    elif not offloads:
        yield fail(
            check,
            f"kv_connector is {name!r}; secondary tiers are of {CONNECTOR}",
            f'"kv_connector": "{CONNECTOR}"',
        )
    elif spec is None:
        yield fail(
            check,
            "no spec_name: vLLM takes CPUOffloadingSpec, which ignores secondary_tiers",
            f'"spec_name": "{SPEC}" in kv_connector_extra_config',
        )
    else:
        yield ok(check, f"{name}, {spec}")


# The tier
# --------------------------------------------------------------------------------------------------


def _tiers(extra: Mapping[str, object], command: EngineCommand) -> Iterator[Finding]:
    """Check the entry that names the bridge, its options, and what they mean for hits."""
    check = "vllm: tier"
    entries = _entries(extra)
    ours = [entry for entry in entries if _is_ours(entry)]
    if not ours:
        kinds = ", ".join(str(entry.get("type")) for entry in entries) or "no tier"
        fix = f'"secondary_tiers": [{json.dumps({**TIER, "driver": "file"})}]'
        yield fail(check, f"secondary_tiers has {kinds}, and not the bridge", fix)
        return
    if len(ours) > 1:
        yield warn(check, f"{len(ours)} entries name the bridge; the first was checked", "one each")
    config, finding = parsed_bridge(check, tier_config, _own(ours[0]))
    yield finding
    if config is not None:
        yield from _generated(extra)
        yield from _sharing(extra, config, command)
        yield from _weights(config, command)


def _generated(extra: Mapping[str, object]) -> Iterator[Finding]:
    check = "vllm: generated tokens"
    match extra.get("offload_prompt_only"):
        case None:
            yield warn(
                check,
                "offload_prompt_only is true by default: answers are not stored, and the next turn "
                "of a chat computes them again",
                '"offload_prompt_only": false in kv_connector_extra_config; true says that it is '
                "meant",
            )
        case value if value:
            yield ok(check, "not stored, as offload_prompt_only says")
        case _:
            yield ok(check, "stored")


def _sharing(
    extra: Mapping[str, object], config: TierConfig, command: EngineCommand
) -> Iterator[Finding]:
    """Report what separates the pages of engines, and what should and does not."""
    ranks = command.number("--tensor-parallel-size", "-tp", default=1)
    canonical = extra.get("canonical_layout")
    alone = "TP sizes share, by canonical_layout" if canonical else "no other TP size shares"
    yield ok("vllm: sharing", f"TP {ranks}; {alone}")
    if (option := command.given(*CHANGES_KV)) and not (config.revision or config.salt):
        value = command.value(option)
        yield warn(
            "vllm: sharing",
            f"{option} changes the KV of a prompt, and vLLM tells a tier nothing of it: an engine "
            "without it is served this one's pages",
            f'"revision": "{option.lstrip("-")} {value[:40]}" beside "driver"',
        )


def _weights(config: TierConfig, command: EngineCommand) -> Iterator[Finding]:
    check = "vllm: weights"
    if config.on_reset == "keep":
        yield ok(check, "on_reset keep: pages are served whatever the weights are by then")
    elif command.given("--enable-sleep-mode"):
        yield warn(
            check,
            "on_reset is miss, and vLLM resets its caches when it sleeps: nothing is served from "
            "then on",
            '"on_reset": "keep" beside "driver", if the weights stay the same',
        )
    else:
        yield ok(check, "on_reset miss: nothing is served after a reset, until a restart")
