"""Options of the Mooncake driver, under Mooncake's names.

Each is read from the driver's options, then SGLang's variables for Mooncake. The last is the
default.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from hicache_storage.spec import ConfigError, DriverConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

SETTINGS: Final = {
    "master_server_address": ("", "MOONCAKE_MASTER"),
    "metadata_server": ("P2PHANDSHAKE", "MOONCAKE_TE_META_DATA_SERVER"),
    "local_hostname": ("localhost", "MOONCAKE_LOCAL_HOSTNAME", "LOCAL_HOSTNAME"),
    "protocol": ("tcp", "MOONCAKE_PROTOCOL"),
    "device_name": ("", "MOONCAKE_DEVICE"),
    "global_segment_size": ("4gb", "MOONCAKE_GLOBAL_SEGMENT_SIZE"),
    "local_buffer_size": ("16mb", "MOONCAKE_LOCAL_BUFFER_SIZE"),
    "tenant_id": ("default", "MOONCAKE_TENANT_ID"),
}
"""Defaults of options, and their environment variables. The first one that is set counts."""
UNSUPPORTED: Final = {
    "MOONCAKE_STANDALONE_STORAGE": "set global_segment_size to 0 instead: a pure client of a store "
    "service on any node",
    "MOONCAKE_ENABLE_SSD_OFFLOAD": "offload in the store service instead (mooncake_client "
    "--enable_offload=true)",
}
"""Variables that the driver refuses, and the alternatives."""
MIN_SEGMENT_BYTES: Final = 16 << 20
"""Memory that a client lends at least, if it lends any; the library refuses less."""

_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_NAMED_SERVICES: Final = ("etcd://", "redis://", "k8s://")
_ADDRESS: Final = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[^\s:/]+):(\d{1,5})")

Text = Annotated[str, Meta(min_length=1)]


class MooncakeConfig(DriverConfig, frozen=True, kw_only=True):
    """Options of the Mooncake driver."""

    master_server_address: Annotated[
        Text | None,
        Meta(
            description="Address of the master, HOST:PORT, or etcd://... for masters that take "
            "over from each other. By default $MOONCAKE_MASTER."
        ),
    ] = None
    metadata_server: Annotated[
        Text | None,
        Meta(
            description="Where transfer engines find each other: http://HOST:PORT/metadata, "
            "etcd://..., or P2PHANDSHAKE, the default."
        ),
    ] = None
    local_hostname: Annotated[
        Text | None,
        Meta(
            description="Name or address at which other nodes reach this one. The default, "
            "localhost, serves one machine only."
        ),
    ] = None
    protocol: Annotated[
        Text | None,
        Meta(
            description="Transport: 'tcp', the default, 'rdma', or another one of the installed "
            "Mooncake."
        ),
    ] = None
    device_name: Annotated[
        str | None, Meta(description="RDMA devices, such as 'mlx5_0,mlx5_1'.")
    ] = None
    global_segment_size: Annotated[
        int | str | None,
        Meta(
            description="Memory that this process lends to the cluster, such as '4gb' (powers of "
            "1024), the default; at least 16 MiB. Its pages leave the cluster with this process. "
            "0 for a pure client of store services."
        ),
    ] = None
    local_buffer_size: Annotated[
        int | str | None,
        Meta(
            description="Size of the client's own buffer, for pages that come from a disk. By "
            "default '16mb'."
        ),
    ] = None
    tenant_id: Annotated[
        Text | None,
        Meta(
            description="Mooncake's tenant, with objects and a quota of its own. By default "
            "'default'."
        ),
    ] = None
    replica_num: Annotated[
        int,
        Meta(
            ge=1,
            description="Number of copies of each page, on different nodes. While the master "
            "still lists a dead node, pages whose first copy it holds are misses, and pages with "
            "a copy there cannot be stored.",
        ),
    ] = 1
    wait_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="Maximum time that a set waits for room that is being made, or for pages "
            "that others are storing.",
        ),
    ] = 0.5
    verify_checksums: Annotated[
        bool,
        Meta(
            description="Verify the checksum of each page that is read. Length, identity and key "
            "are always verified."
        ),
    ] = True


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the library's client. Storages with equal settings share one."""

    master_server_address: str
    metadata_server: str
    local_hostname: str
    protocol: str
    device_name: str
    global_segment_size: int
    local_buffer_size: int
    tenant_id: str

    @property
    def master(self) -> tuple[str, int] | None:
        """Host and port of the master; None if a name service resolves it."""
        if self.master_server_address.startswith(_NAMED_SERVICES):
            return None
        host, _, port = self.master_server_address.rpartition(":")
        return host.strip("[]"), int(port)


def client_settings(
    config: MooncakeConfig, environment: Mapping[str, str] | None = None
) -> ClientSettings:
    """Resolve a client's settings.

    Raises:
        ConfigError: a setting is missing or invalid; the message names it and a valid form.
    """
    environment = os.environ if environment is None else environment
    for variable, instead in UNSUPPORTED.items():
        if environment.get(variable, "").lower() not in ("", "0", "false", "no", "n"):
            raise ConfigError(f"${variable} is not offered here; {instead}")
    given = msgspec.structs.asdict(config)
    found = dict[str, object]()
    for name, (default, *variables) in SETTINGS.items():
        named = [environment[variable] for variable in variables if environment.get(variable)]
        found[name] = next((value for value in (given[name], *named) if value is not None), default)
    if not found["master_server_address"]:
        raise ConfigError(
            "no master: set the option 'master_server_address' to its HOST:PORT, or "
            "$MOONCAKE_MASTER; Mooncake's JSON file is not read"
        )
    for name, value in found.items():
        found[name] = size_of(value, name) if name.endswith("_size") else str(value).strip()
    found["protocol"] = str(found["protocol"]).lower()
    settings = msgspec.convert(found, ClientSettings)
    _check_address(settings.master_server_address)
    if 0 < settings.global_segment_size < MIN_SEGMENT_BYTES:
        raise ConfigError(
            f"global_segment_size is {settings.global_segment_size:,} bytes, and Mooncake takes "
            f"{MIN_SEGMENT_BYTES:,} or more; write '16mb', or 0 for a pure client"
        )
    return settings


def size_of(value: object, name: str) -> int:
    """Parse a size in Mooncake's notation: '4gb' is 4 times 1024 to the power of 3.

    Raises:
        ConfigError: the value of this setting is malformed.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(
            f"{name} is {value!r}, which is no size; write for example '4gb', '512mb' or a "
            f"number of bytes"
        )
    number, unit = match.groups()
    return int(float(number) * 1024 ** _POWERS[unit.lower()])


def _check_address(address: str) -> None:
    if address.startswith(_NAMED_SERVICES):
        return
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[1]) < 65536:
        raise ConfigError(
            f"master_server_address is {address!r}; write HOST:PORT, such as 10.0.0.1:50051"
        )
