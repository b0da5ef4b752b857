"""Clients of redis-py, one factory for all kinds of addresses."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from redis.asyncio import (
    BlockingConnectionPool,
    Connection,
    Redis,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError

from hicache_metadata_server.storage.address import Address, AddressKind, Credentials, TlsFiles

if TYPE_CHECKING:
    from collections.abc import Callable

CONNECT_SECONDS: Final = 1.0
SENTINEL_SECONDS: Final = 0.5
"""Timeout of each Sentinel, to connect and to answer."""
CONNECTIONS: Final = 64
"""Limit of one server process."""


class PasswordFile(CredentialProvider):
    """Credential provider that reads the password file for each new connection.

    The password can be changed while servers run.
    """

    def __init__(self, login: Credentials) -> None:
        self._login = login

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return the password, or user and password.

        Raises:
            AuthenticationError: the file cannot be read, or is empty.
        """
        try:
            password = Path(self._login.password_file).read_text("utf-8").strip()
        except (OSError, UnicodeError) as error:
            # The text of a UnicodeError contains the bytes of the file, so only its type is shown.
            raise AuthenticationError(
                f"{self._login.password_file} cannot be read: {type(error).__name__}"
            ) from None
        if not password:
            raise AuthenticationError(f"{self._login.password_file} is empty")
        return (self._login.user, password) if self._login.user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """Return the same; redis-py calls this method from its asynchronous connections."""
        return self.get_credentials()


class _SentinelPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connection pool behind Sentinels that waits for a free connection.

    The pool of redis-py for Sentinels fails at once when all connections are in use.
    """


class _Sentinels(Sentinel):
    """Sentinel client with a complete list of Sentinels.

    redis-py moves the Sentinel that has named the primary to the head of its list, by swapping
    entries. Two concurrent discoveries can duplicate one entry, and lose another: that Sentinel is
    never asked again, and its connection is never closed.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]
        self.all: Final[tuple[Any, ...]] = tuple(self.sentinels)

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        try:
            return cast("tuple[str, int]", await super().discover_master(service_name))
        finally:
            first = self.sentinels[0]
            self.sentinels = [first, *(one for one in self.all if one is not first)]


def client_of(address: Address, answer_seconds: float) -> tuple[Any, Callable[[], Any]]:
    """Return a client that connects on demand, and the function that closes it."""
    # No retries in the library: a command whose answer was lost may have been executed. Only a
    # caller with an idempotency key may repeat it.
    options: dict[str, Any] = {
        # With RESP3, redis-py 8 follows notices of maintenance: it raises the timeout while a node
        # is replaced, and reuses a connection that has an unread reply, so that each later command
        # is answered with the reply to the one before it.
        "protocol": 2,
        "socket_timeout": answer_seconds,
        "socket_connect_timeout": CONNECT_SECONDS,
        "retry": Retry(NoBackoff(), 0),
        "max_connections": CONNECTIONS,
        **_login(address.login),
        **_tls(address.tls),
    }
    if address.kind is AddressKind.CLUSTER:
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        cluster = RedisCluster(startup_nodes=nodes, ssl=address.tls is not None, **options)
        return cluster, cluster.aclose
    if address.kind is AddressKind.SENTINEL:
        return _by_sentinel(address, options | {"timeout": answer_seconds, "db": address.db})
    pool = BlockingConnectionPool(
        timeout=answer_seconds, db=address.db, **_where(address), **options
    )
    one = Redis.from_pool(pool)
    return one, one.aclose


def _where(address: Address) -> dict[str, Any]:
    if address.kind is AddressKind.SOCKET:
        return {"connection_class": UnixDomainSocketConnection, "path": address.path}
    [(host, port)] = address.hosts
    return {
        "connection_class": SSLConnection if address.tls else Connection,
        "host": host,
        "port": port,
    }


def _by_sentinel(address: Address, options: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    secure: dict[str, Any] = {"ssl": True} if address.tls else {}
    asked: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": SENTINEL_SECONDS,
        "socket_connect_timeout": SENTINEL_SECONDS,
        "retry": Retry(NoBackoff(), 0),
        **secure,
        **_login(address.sentinel_login),
        **_tls(address.tls),
    }
    sentinels = _Sentinels(list(address.hosts), sentinel_kwargs=asked)
    primary: Any = sentinels.master_for(
        address.name, connection_pool_class=_SentinelPool, **secure, **options
    )

    async def close() -> None:
        # Closing the client of the primary leaves the connections to the Sentinels open.
        await primary.aclose()
        for sentinel in sentinels.all:
            await sentinel.aclose()

    return primary, close


def _login(login: Credentials) -> dict[str, Any]:
    if login.password_file:
        return {"credential_provider": PasswordFile(login)}
    return {"username": login.user or None, "password": login.password or None}


def _tls(tls: TlsFiles | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "ssl_ca_certs": tls.ca or None,
        "ssl_certfile": tls.certificate or None,
        "ssl_keyfile": tls.key or None,
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_min_version": ssl.TLSVersion.TLSv1_2,
    }
