"""Host names under which no node reaches the memory that a process lends."""

from __future__ import annotations

import pytest

from hicache_backends.mooncake.config import MooncakeConfig, client_settings
from hicache_backends.mooncake.driver import check_local_hostname
from hicache_storage.spec import StorageUnavailableError
from tests.backends.file.harness import chain

ELSEWHERE = "198.51.100.1"
"""An address for documentation, which no machine has."""


def check(**options):
    settings = {"master_server_address": f"{ELSEWHERE}:1", "global_segment_size": "16mb"}
    check_local_hostname(client_settings(MooncakeConfig(**{**settings, **options}), {}))


# The last: clients listen over IPv4.
@pytest.mark.parametrize("name", [ELSEWHERE, f"{ELSEWHERE}:7777", "a..b", "[::1]:7777"])
def test_no_memory_is_lent_under_a_name_that_does_not_lead_here(cluster, rig, name):
    """The master would give it to all clients, and each transfer to it would fail or hang."""
    lender = rig(local_hostname=name, global_segment_size="16mb")
    with pytest.raises(StorageUnavailableError) as refused:
        lender.storage.open()
    assert f"local_hostname is {name!r}" in str(refused.value)
    assert "set it to an address of this node" in str(refused.value)
    health = lender.storage.health()
    assert not health.ok
    assert f"local_hostname is {name!r}" in health.detail
    assert lender.put(chain("refused", 2)) == [False] * 2
    assert cluster.capacity() == 2 * (64 << 20)


def test_which_names_are_addresses():
    for name in ("127.0.0.1", "127.0.0.2:7777", "::ffff:127.0.0.1", "[::ffff:127.0.0.1]:7777"):
        check(local_hostname=name)
    check(local_hostname=ELSEWHERE, metadata_server="http://127.0.0.1:8080/metadata")
    check(local_hostname=ELSEWHERE, global_segment_size=0)
    with pytest.raises(StorageUnavailableError):
        # A queue pair is connected from both ends.
        check(local_hostname=ELSEWHERE, global_segment_size=0, protocol="rdma")


@pytest.mark.parametrize("name", ["localhost", "127.0.0.2", "0.0.0.0"])
def test_a_name_that_only_this_machine_reaches(name, caplog):
    check(local_hostname=name, master_server_address="127.0.0.1:50051")
    assert not caplog.records
    check(local_hostname=name)
    (record,) = caplog.records
    assert f"local_hostname is '{name}'" in record.getMessage()
