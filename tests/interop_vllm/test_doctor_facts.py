"""What doctor says of the engines' command lines, compared with the engines that are installed."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import get_args

import pytest
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.multiprocess.config import add_mp_server_args
from vllm.config.cache import CacheConfig, PrefixCachingHashAlgo
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from hicache_storage.engines.vllm.identity import ENGINE_KEYS
from hicache_storage.tools.doctor import DoctorTarget, Status, lmcache, vllm
from tests.interop_vllm.test_tier import Engine

pytestmark = [
    pytest.mark.vllm,
    # LMCache makes its loggers with what OpenTelemetry deprecates.
    pytest.mark.filterwarnings("ignore:.LoggingHandler.:DeprecationWarning"),
]

ALGORITHMS = ("blake3", "sha256_cbor", "builtin")
HASHES = f"""
from lmcache.v1.multiprocess.token_hasher import TokenHasher
for name in {ALGORITHMS}:
    print("key", name, TokenHasher(4, name).compute_chunk_hashes([1, 2, 3, 4])[0].hex())
"""


def finding(findings, check):
    """Return the only finding of a check."""
    [found] = [each for each in findings if each.check == check]
    return found


def of_vllm(*words):
    return list(vllm.check_vllm(DoctorTarget(engine="vllm", command_line=list(words))))


def of_lmcache(*words):
    return list(lmcache.check_lmcache(DoctorTarget(engine="lmcache", command_line=list(words))))


def test_the_installed_versions_are_known():
    assert finding(of_vllm(), "vllm: version").status is Status.OK
    assert finding(of_lmcache(), "lmcache: version").status is Status.OK


# vLLM
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", get_args(PrefixCachingHashAlgo))
@pytest.mark.parametrize("seed", [None, "0"])
def test_keys_that_differ_in_each_process_fail(monkeypatch, algorithm, seed):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    hash_function = get_hash_fn_by_name(algorithm)
    stable = resolve_none_hash_seed(hash_function) == resolve_none_hash_seed(hash_function)
    found = finding(of_vllm("--prefix-caching-hash-algo", algorithm), "vllm: keys")
    assert (found.status is not Status.FAIL) is stable


def test_defaults_of_vllm(tmp_path):
    assert CacheConfig.prefix_caching_hash_algo == "sha256"
    # Without a name it is one that has no tiers.
    assert OffloadingSpecFactory.get_spec_cls({}).__name__ == "CPUOffloadingSpec"
    assert OffloadingSpecFactory.get_spec_cls({"spec_name": vllm.SPEC}) is TieringOffloadingSpec


def test_keys_that_vllm_keeps_from_a_tier(tmp_path, monkeypatch):
    passed = {}
    monkeypatch.setattr(
        SecondaryTierFactory, "get_tier_class", lambda _config: lambda **given: passed.update(given)
    )
    config = {**dict.fromkeys(ENGINE_KEYS), **vllm.TIER, "driver": "file"}
    SecondaryTierFactory.create_secondary_tier(config, memoryview(b""), None)
    assert set(passed) & (ENGINE_KEYS | {"driver"}) == {"driver"}


def test_the_tier_is_what_the_doctor_names(tmp_path):
    engine = Engine(tmp_path)
    assert SecondaryTierFactory.get_tier_class(vllm.TIER) is type(engine.tier)
    engine.close()


# LMCache
# --------------------------------------------------------------------------------------------------


def hashes(seed):
    """Return the key of a chunk by each algorithm, in a process of its own."""
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    if not seed:
        del environment["PYTHONHASHSEED"]
    command = [sys.executable, "-W", "ignore", "-c", HASHES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("key ")]
    return {name: key for _, name, key in lines}


@pytest.mark.long
def test_keys_of_another_server():
    none, zero, again = hashes(""), hashes("0"), hashes("0")
    assert none["blake3"] == zero["blake3"]
    assert none["sha256_cbor"] != zero["sha256_cbor"] == again["sha256_cbor"]
    # Python's own hash of None is an address.
    assert zero["builtin"] != again["builtin"]
    said = {
        name: finding(of_lmcache("--hash-algorithm", name), "lmcache: keys").status
        for name in ALGORITHMS
    }
    assert said == {"blake3": Status.OK, "sha256_cbor": Status.WARN, "builtin": Status.FAIL}


def arguments(*words):
    """Parse a command line as `lmcache server` does."""
    parser = argparse.ArgumentParser()
    add_mp_server_args(parser)
    add_storage_manager_args(parser)
    return parser.parse_args(words)


def test_defaults_of_lmcaches_server():
    defaults = arguments()
    assert (defaults.hash_algorithm, defaults.chunk_size) == ("blake3", 256)


def test_the_example_is_a_command_line_of_lmcaches():
    text = json.dumps({**lmcache.NAMES, "adapter_params": {"driver": "file"}})
    words = ("--l1-size-gb", "1", "--eviction-policy", "LRU", lmcache.ADAPTER, text)
    [adapter] = parse_args_to_config(arguments(*words)).l2_adapter_config.adapters
    assert (adapter.module_path, adapter.class_name) == (
        lmcache.NAMES["module_path"],
        lmcache.NAMES["class_name"],
    )
