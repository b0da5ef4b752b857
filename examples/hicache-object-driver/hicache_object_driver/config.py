"""Options of the driver."""

from __future__ import annotations

from typing import Annotated

from hicache_storage.spec import DriverConfig, Durability
from msgspec import Meta


class ObjectConfig(DriverConfig, frozen=True, kw_only=True):
    """Options of the driver `object`."""

    url: Annotated[
        str,
        Meta(
            description="Bucket, which exists, and a prefix of its own: `s3://BUCKET/PREFIX`, "
            "`gs://...`, `az://...`; or `file:///DIRECTORY`."
        ),
    ]
    options: Annotated[
        str,
        Meta(
            description="Of the store's client, as `endpoint=...,region=...`. The rest, such as "
            "credentials, comes from the environment (`AWS_ACCESS_KEY_ID`)."
        ),
    ] = ""
    concurrency: Annotated[
        int, Meta(ge=16, le=1024, description="Requests in flight at a time, of all calls.")
    ] = 32
    durability: Annotated[
        Durability,
        Meta(
            description="What a stored page survives: `machine` with a cloud's store, `reopen` "
            "with a server that keeps it in memory."
        ),
    ] = Durability.REOPEN
