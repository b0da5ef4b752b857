"""Options of the 3FS driver."""

from __future__ import annotations

import os
from typing import Annotated, Final, Literal

from msgspec import Meta

from hicache_backends.posix.directories import check_path
from hicache_metadata_server.client.failover import addresses
from hicache_storage.spec import DriverConfig, parse_bytes

TOKEN_VARIABLE: Final = "HICACHE_METADATA_TOKEN"

Seconds = Annotated[float, Meta(gt=0)]


class Hf3fsConfig(DriverConfig, frozen=True, kw_only=True):
    """Options of the 3FS driver. All clients of one directory must be given the same `file_size`.

    Raises:
        ValueError: a size, the path or an address is malformed.
    """

    path: Annotated[
        str,
        Meta(
            min_length=1,
            description="Directory of the slot files, on a mount that all clients see; created if "
            "it is missing.",
        ),
    ]
    metadata_url: Annotated[
        str | tuple[str, ...],
        Meta(
            description="Required. Address of the metadata server that `hicache metadata serve` "
            "starts, such as http://meta:18000, or of several servers on one store, as a list or "
            "separated by commas."
        ),
    ] = ""
    token: Annotated[
        str,
        Meta(
            description="Bearer token for the metadata server, with the right *write*. By "
            f"default ${TOKEN_VARIABLE}."
        ),
    ] = ""
    file_size: Annotated[
        int | str,
        Meta(
            description="Maximum size of each namespace's file, such as '1TiB'; a namespace is a "
            "pool of one model in one geometry. The least recently used pages are evicted. A full "
            "file sustains writes of half its size in the time of a quarantine. Disk space is "
            "used as pages are written."
        ),
    ] = "16GiB"
    engine: Annotated[
        Literal["posix", "usrbio"],
        Meta(
            description="Input and output: 'posix', vectored reads and writes, or 'usrbio', 3FS's "
            "interface past the kernel (package hf3fs-py-usrbio, experimental)."
        ),
    ] = "posix"
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Maximum number of threads that move the bytes of one call. By "
            "default 4, or the number of cores if less, on a local disk; 8 elsewhere."
        ),
    ] = None
    lease_seconds: Annotated[
        Seconds,
        Meta(
            description="Duration of a write lease: how long the slot of a dead writer stays "
            "reserved. Slow writes renew their leases."
        ),
    ] = 10.0
    wait_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="Maximum time that a set waits for pages that others are writing, or for "
            "quarantined slots.",
        ),
    ] = 1.0
    verify_checksums: Annotated[
        bool,
        Meta(
            description="Verify the checksum over the bytes of each page that is read. Without "
            "it, only the envelope is verified (length, identity, key, and the checksum that the "
            "server names), and bytes that were damaged later are delivered."
        ),
    ] = True
    metadata_ca: Annotated[
        str,
        Meta(
            description="PEM file of the authorities that may have signed the certificate of a "
            "metadata server at https://. By default the system's."
        ),
    ] = ""
    metadata_certificate: Annotated[
        str,
        Meta(
            description="PEM file of this client's certificate for a metadata server at https://."
        ),
    ] = ""
    metadata_key: Annotated[
        str,
        Meta(
            description="PEM file of the certificate's private key. By default it is in the file "
            "of the certificate."
        ),
    ] = ""

    def __post_init__(self) -> None:
        check_path(self.path)
        try:
            if not self.file_bytes:
                raise ValueError("must not be 0")
        except ValueError as error:
            raise ValueError(f"file_size: {error}") from error
        if not self.metadata_url:
            raise ValueError(
                "metadata_url is missing: the address of a metadata server, which `hicache "
                "metadata serve` starts"
            )
        try:
            _ = self.metadata_urls
        except ValueError as error:
            raise ValueError(f"metadata_url: {error}") from error
        self._check_tls()

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        values["token"] = "..." if self.token else ""
        return f"Hf3fsConfig({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def _check_tls(self) -> None:
        if self.metadata_key and not self.metadata_certificate:
            raise ValueError("metadata_key needs metadata_certificate")
        given = next(
            (name for name in ("metadata_ca", "metadata_certificate") if getattr(self, name)), ""
        )
        if given and not self.is_secure:
            raise ValueError(f"{given} needs a metadata_url that begins with https://")

    @property
    def is_secure(self) -> bool:
        """True if any metadata server is at `https://`."""
        return any(url.startswith("https:") for url in self.metadata_urls)

    @property
    def metadata_urls(self) -> tuple[str, ...]:
        """Addresses of the metadata servers."""
        return addresses(self.metadata_url)

    @property
    def file_bytes(self) -> int:
        """`file_size` in bytes."""
        return parse_bytes(self.file_size)

    @property
    def bearer(self) -> str:
        """The token, of the option or of the environment variable."""
        return self.token or os.environ.get(TOKEN_VARIABLE, "")
