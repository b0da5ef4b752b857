"""Pool names, transfers, sizes, configuration and the error tree."""

from __future__ import annotations

import enum
import inspect
import math
import pickle

import pytest

from hicache_storage import spec
from hicache_storage.spec import errors


class EnginePool(str, enum.Enum):  # noqa: UP042 - what SGLang's own enum is
    MAMBA = "mamba"


def test_pool_names_equal_and_hash_as_their_text():
    assert spec.PoolName.KV == "kv"
    assert {"kv": 1}[spec.PoolName.KV] == 1
    assert {spec.PoolName("my_pool_7"): 1}["my_pool_7"] == 1
    assert spec.PoolName(EnginePool.MAMBA) == "mamba"
    assert str(spec.PoolName(EnginePool.MAMBA)) == "mamba"


@pytest.mark.parametrize("name", ["a" * 64, "0_z"])
def test_legal_names_stay(name):
    assert spec.PoolName(name) == name


@pytest.mark.parametrize("name", ["", "KV", "a-b", "a" * 65, "../kv", "kv\n"])
def test_other_names_are_refused(name):
    with pytest.raises(spec.InvalidTransferError, match="pool name"):
        spec.PoolName(name)


def test_transfers_convert_what_engines_write():
    transfer = spec.PoolTransfer("mamba", hit_policy="trailing_pages", indices_from_pool="kv")
    assert isinstance(transfer.name, spec.PoolName)
    assert transfer.hit_policy is spec.PoolHitPolicy.TRAILING_PAGES
    assert transfer.indices_from_pool == spec.PoolName.KV
    with pytest.raises(ValueError, match="some_pages"):
        spec.PoolTransfer("mamba", hit_policy="some_pages")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        (7, 7),
        ("1KiB", 1024),
        ("1kb", 1000),
        ("1.5 GiB", 3 << 29),
        ("2T", 2 * 10**12),
        ("1g", 10**9),
    ],
)
def test_sizes(text, size):
    assert spec.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "big", "-1", "1 2", "1KiBB", "GiB"])
def test_texts_that_are_no_sizes(text):
    with pytest.raises(ValueError, match="is not a size"):
        spec.parse_bytes(text)


class Options(spec.DriverConfig):
    path: str
    threads: int = 1
    fsync: bool = False
    share: float = 0.5
    wait_seconds: int | float = 1


def test_options_are_converted_from_text():
    assert spec.parse_config(Options, {"path": "x", "threads": "4", "fsync": "true"}) == Options(
        path="x", threads=4, fsync=True
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "x", "thread": 2}, "unknown option 'thread'; did you mean 'threads'"),
        ({"path": "x", "zzz": 2}, "unknown option 'zzz'; known options: path, threads, fsync"),
        # NaN passes every comparison, and no lock waits as long as the others.
        *[({"path": "x", "share": bad}, "share") for bad in (math.nan, "Infinity")],
        *[
            ({"path": "x", "wait_seconds": bad}, "wait_seconds")
            for bad in ("nan", math.inf, 1e10, 10**12)
        ],
        ({}, "path"),
        ({"path": "x", "threads": "many"}, "threads"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(spec.ConfigError, match=message):
        spec.parse_config(Options, options)


def error_classes():
    return [
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, errors.HiCacheError)
    ]


def test_the_tree_of_errors_is_drawn():
    for cls in error_classes():
        assert cls.__name__ in errors.__doc__
        assert pickle.loads(pickle.dumps(cls("why"))).args == ("why",)
