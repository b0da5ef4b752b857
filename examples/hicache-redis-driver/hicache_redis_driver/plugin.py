"""Registers the driver. Imported whenever drivers are listed, so it imports nothing heavy."""

from __future__ import annotations

from hicache_storage.hookspecs import DriverSpec, hookimpl
from hicache_storage.spec import Capabilities, Durability, HungReads, Sharing

CAPABILITIES = Capabilities(
    sharing=Sharing.PROCESSES,
    durability=Durability.PROCESS,
    deletes=True,
    clears=True,
    evicts=True,
    networked=True,
    hung_reads=HungReads.BOUNCE_BUFFER,
    max_page_bytes=32 << 20,
)


@hookimpl
def hicache_register_drivers() -> list[DriverSpec]:
    return [
        DriverSpec(
            name="redis",
            target="hicache_redis_driver.driver:RedisStorage",
            config="hicache_redis_driver.config:RedisConfig",
            capabilities=CAPABILITIES,
            summary="pages in a Redis, evicted from the tails of chains",
            requires=("redis",),
            trial_config={
                "url": "redis://127.0.0.1:{port:redis}/0",
                "prefix": "{unique}",
                "durability": "process",
            },
            trial_services=(
                (
                    "redis-server",
                    *("--port", "{port:redis}", "--bind", "127.0.0.1", "--dir", "{tmp}"),
                    *("--save", "", "--appendonly", "yes", "--appendfsync", "always"),
                    # The suite copies the log while Redis runs; a rewrite would replace its files.
                    *("--auto-aof-rewrite-percentage", "0"),
                ),
            ),
            capacity_option="capacity",
        )
    ]
