"""Registers the driver. Imported whenever drivers are listed, so it imports nothing heavy."""

from __future__ import annotations

import sys

from hicache_storage.hookspecs import DriverSpec, hookimpl
from hicache_storage.spec import Capabilities, Durability, HungReads, Sharing

TRIAL_SERVER = "hicache_object_driver.trial_server"
CAPABILITIES = Capabilities(
    sharing=Sharing.PROCESSES,
    durability=Durability.MACHINE,
    deletes=True,
    clears=True,
    networked=True,
    requests_in_flight=1024,
    hung_reads=HungReads.BOUNCE_BUFFER,
)


@hookimpl
def hicache_register_drivers() -> list[DriverSpec]:
    return [
        DriverSpec(
            name="object",
            target="hicache_object_driver.driver:ObjectBucketStorage",
            config="hicache_object_driver.config:ObjectConfig",
            capabilities=CAPABILITIES,
            summary="pages in a bucket of S3, GCS or Azure, or in a directory",
            requires=("obstore",),
            # moto's server of the S3 protocol, which keeps objects in memory.
            trial_config={
                "url": "s3://pages/{unique}",
                "options": "endpoint=http://127.0.0.1:{port:s3},region=us-east-1,"
                "access_key_id=trial,secret_access_key=trial",
            },
            trial_services=((sys.executable, "-P", "-m", TRIAL_SERVER, "{port:s3}"),),
        )
    ]
