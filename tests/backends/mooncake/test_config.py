from __future__ import annotations

import pytest

from hicache_backends.mooncake.client.connection import max_lookup_seconds
from hicache_backends.mooncake.config import MooncakeConfig, client_settings, size_of
from hicache_storage.spec import ConfigError, parse_config


def settings(environment=None, **options):
    return client_settings(parse_config(MooncakeConfig, options), environment or {})


def test_what_counts_first():
    """The driver's options, then SGLang's variables, then the defaults."""
    environment = {
        "MOONCAKE_MASTER": " variable:2",
        "MOONCAKE_PROTOCOL": "RDMA",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "2gb",
        "MOONCAKE_DEVICE": "",
        "LOCAL_HOSTNAME": "old",
        "MOONCAKE_STANDALONE_STORAGE": "False",
    }
    found = settings(environment, global_segment_size="1gb")
    assert found.global_segment_size == 1 << 30
    assert found.master_server_address == "variable:2"
    assert (found.protocol, found.device_name, found.local_hostname) == ("rdma", "", "old")
    assert (found.metadata_server, found.tenant_id) == ("P2PHANDSHAKE", "default")


def test_sizes_are_mooncakes():
    for text, size in (
        ("4gb", 4 << 30),
        ("4 GB", 4 << 30),
        ("512mb", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("0", 0),
        ("77", 77),
        (77, 77),
    ):
        assert size_of(text, "it") == size


@pytest.mark.parametrize(
    ("environment", "options", "complaint"),
    [
        ({}, {}, "'master_server_address'.*MOONCAKE_MASTER.*JSON file is not read"),
        (
            {"MOONCAKE_MASTER": "m:1", "MOONCAKE_STANDALONE_STORAGE": "true"},
            {},
            r"\$MOONCAKE_STANDALONE_STORAGE is not offered.*global_segment_size to 0",
        ),
        (
            {},
            {"master_server_address": "master"},
            "master_server_address is 'master'; write HOST:PORT",
        ),
        ({"MOONCAKE_MASTER": "m:99999"}, {}, "master_server_address is 'm:99999'"),
        (
            {"MOONCAKE_MASTER": "m:1", "MOONCAKE_GLOBAL_SEGMENT_SIZE": "lots"},
            {},
            "global_segment_size is 'lots'.*'4gb'",
        ),
        (
            {},
            {"master_server_address": "m:1", "local_buffer_size": -1},
            "local_buffer_size is -1",
        ),
        (
            {"MOONCAKE_GLOBAL_SEGMENT_SIZE": "15mb"},
            {"master_server_address": "m:1"},
            "global_segment_size is 15,728,640 bytes.*16,777,216 or more",
        ),
        ({}, {"master_adress": "m:1"}, "did you mean"),
    ],
)
def test_errors_name_the_setting_and_the_fix(environment, options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        settings(environment, **options)


def test_masters_behind_a_name_service():
    assert settings(master_server_address="etcd://10.0.0.1:2379").master is None
    assert settings(master_server_address="[::1]:50051").master == ("::1", 50051)


def test_how_long_a_lookup_may_take(monkeypatch):
    """As long as the library tries to connect, and twice as long as a request; shorter than the
    SDK's own deadline of 30 s."""
    for name in ("MC_RPC_TIMEOUT_MS", "MC_RPC_CONNECT_TIMEOUT_MS"):
        monkeypatch.delenv(name, raising=False)
    assert (
        max_lookup_seconds(settings(master_server_address="m:1"))
        == 4 * (2 + 1) + 2 * 5 + 2 * 2
        < 30
    )
    assert max_lookup_seconds(settings(master_server_address="etcd://m:1")) is None
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "60000")
    assert max_lookup_seconds(settings(master_server_address="m:1")) == 4 * (2 + 1) + 2 * 60 + 2 * 2
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "a minute")
    assert max_lookup_seconds(settings(master_server_address="m:1")) is None
