"""Check that other clients reach this one under its host name."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
from typing import TYPE_CHECKING, Final

from hicache_storage.spec import StorageUnavailableError

if TYPE_CHECKING:
    from hicache_backends.mooncake.config import ClientSettings

logger = logging.getLogger(__name__)

FIX: Final = "set it to an address of this node that every node reaches"
SECONDS: Final = 2.0
_HOST: Final = re.compile(r"\[(.+)\](?::\d+)?|([^:]+)(?::\d+)?")


def check_local_hostname(settings: ClientSettings) -> None:
    """Check that `local_hostname` leads to this node, before memory is lent under it.

    Transfers to that memory connect to this name, those of this process too. Over TCP nothing
    connects to a client that lends none, and with a metadata server the name is no address.

    Raises:
        StorageUnavailableError: the name cannot be resolved, or does not lead here.
    """
    pure_client = settings.protocol == "tcp" and not settings.global_segment_size
    if settings.metadata_server != "P2PHANDSHAKE" or pure_client:
        return
    name = settings.local_hostname
    match = _HOST.fullmatch(name)
    host = (match[1] or match[2]) if match else name
    # As the library does: over IPv4 alone, unless the operator has set this.
    ipv6 = "MC_USE_IPV6" in os.environ
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    try:
        with socket.create_server(("", 0), family=family, dualstack_ipv6=ipv6) as listener:
            listener.settimeout(SECONDS)
            with socket.create_connection((host, listener.getsockname()[1]), SECONDS):
                # The connection may have been accepted by another node.
                listener.accept()[0].close()
    except (OSError, UnicodeError) as error:
        raise StorageUnavailableError(
            f"local_hostname is {name!r}, which does not lead to this node ({error}): {FIX}"
        ) from error
    master = settings.master
    if master is not None and _is_loopback(host) and not _is_loopback(master[0]):
        logger.warning(
            "mooncake: local_hostname is %r, under which only this node reaches the memory that it "
            "lends; where the master %s has clients on others, %s",
            name,
            settings.master_server_address,
            FIX,
        )


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return False
    return address.is_loopback or address.is_unspecified
