"""Registration of the driver `mooncake`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from hicache_storage.hookspecs import DriverSpec, hookimpl
from hicache_storage.spec import Capabilities, Durability, HungReads, Sharing

if TYPE_CHECKING:
    from collections.abc import Sequence

CAPABILITIES: Final = Capabilities(
    sharing=Sharing.PROCESSES,
    durability=Durability.REOPEN,
    deletes=True,
    clears=True,
    networked=True,
    hung_reads=HungReads.BOUNCE_BUFFER,
)
# The master keeps the memory of a set that was given up for longer than a store is stopped: bytes
# that arrive when the store goes on would be in the page that has the memory then.
MASTER: Final = (
    "-m mooncake.cli --rpc_address=127.0.0.1 --rpc_port={port:master} --metrics_host=127.0.0.1 "
    "--metrics_port={port:metrics} --default_kv_lease_ttl=2000 --client_ttl=30 "
    "--put_start_discard_timeout_sec=1 --put_start_release_timeout_sec=60"
)
# A store draws its ports at each start, by default two of 2,000, and clients remember the data port
# of each handshake port. They would never reach a restarted store that draws the handshake port of an
# earlier start again.
PORTS: Final = ("env", "MC_MIN_RPC_PORT=10000", "MC_MAX_RPC_PORT=29999")
STORE: Final = (
    "-m mooncake.cli_client --host=127.0.0.1 --port={port:STORE} "
    "--master_server_address=127.0.0.1:{port:master} --metadata_server=P2PHANDSHAKE "
    "--protocol=tcp --global_segment_size=256MB"
)
STORES: Final = ("store", "store2", "store3")
"""Names of the ports of several stores; each stands for `STORE` in its command."""


@hookimpl
def hicache_register_drivers() -> Sequence[DriverSpec]:
    """Register the driver `mooncake`."""
    return [
        DriverSpec(
            name="mooncake",
            target="hicache_backends.mooncake.driver:MooncakeStorage",
            config="hicache_backends.mooncake.config:MooncakeConfig",
            capabilities=CAPABILITIES,
            summary="Memory of many nodes, by Mooncake Store, over RDMA or TCP",
            requires=("mooncake-transfer-engine-non-cuda",),
            # A store service keeps the pages: memory that a process lends leaves with the process.
            trial_config={
                "master_server_address": "127.0.0.1:{port:master}",
                "local_hostname": "127.0.0.1",
                "global_segment_size": "0",
                # Longer than the master keeps a killed writer's begun objects, which block their
                # keys.
                "wait_seconds": "2",
            },
            trial_services=tuple(
                (*PORTS, sys.executable, *command.split())
                for command in (MASTER, *(STORE.replace("STORE", port) for port in STORES))
            ),
            trial_members=STORES,
        )
    ]
