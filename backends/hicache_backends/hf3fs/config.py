"""Options of the 3FS driver."""

from __future__ import annotations

import os
from typing import Annotated, Final, Literal

from msgspec import Meta

from hicache_backends.posix.directories import check_path
from hicache_metadata_server.client.addresses import addresses
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
            description="Directory of the files, on a mount that all clients see; made if missing.",
        ),
    ]
    metadata_url: Annotated[
        str | tuple[str, ...] | None,
        Meta(
            description="Address of the metadata server, such as http://meta:18000; or of several "
            "on one store, as a list or separated by "
            "commas. Without it, or empty, the map is kept in this process: one process for each "
            "directory, and nothing outlives it."
        ),
    ] = None
    token: Annotated[
        str,
        Meta(
            description=f"Bearer token for the metadata server, one that may write. By default "
            f"${TOKEN_VARIABLE}."
        ),
    ] = ""
    file_size: Annotated[
        int | str,
        Meta(
            description="Bytes of each namespace's file, such as '1TiB': a pool of one model in "
            "one geometry. The least recently used "
            "pages are evicted to keep it. Once full, it takes half of this in the time of a "
            "quarantine, for long. A file takes room on the disk only as pages are "
            "written, unless preallocate is set."
        ),
    ] = "16GiB"
    preallocate: Annotated[
        bool,
        Meta(
            description="Take the file's whole room from the file system when it is made. A file "
            "system that cannot leaves the file sparse."
        ),
    ] = False
    engine: Annotated[
        Literal["auto", "usrbio", "posix"],
        Meta(
            description="What moves the bytes: 'usrbio', 3FS's interface past the kernel (package "
            "hf3fs-py-usrbio), or 'posix', "
            "vectored reads and writes. By default usrbio on a 3FS mount where the package is "
            "installed."
        ),
    ] = "auto"
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Most threads that move the bytes of one call, engine posix. By default 4, "
            "or the number of cores if "
            "less, on a local disk, and 8 elsewhere."
        ),
    ] = None
    hung_reads: Annotated[
        Literal["auto", "wait", "bounce_buffer"],
        Meta(
            description="What a get does about a read that does not come back before the deadline, "
            "engine posix. 'bounce_buffer': it "
            "returns; pages are read into buffers of the driver's own and copied. 'wait': it "
            "waits; pages are read straight into "
            "the host pool. By default 'wait' on a local disk, and 'bounce_buffer' elsewhere."
        ),
    ] = "auto"
    usrbio_rings: Annotated[
        int,
        Meta(
            ge=1,
            description="Calls that may read, and as many that may write, at a time, engine usrbio.",
        ),
    ] = 2
    usrbio_entries: Annotated[
        int, Meta(ge=1, description="Requests in flight in one ring, engine usrbio.")
    ] = 256
    usrbio_buffer: Annotated[
        int | str,
        Meta(description="Shared memory of one ring, through which its bytes go, engine usrbio."),
    ] = "64MiB"
    lease_seconds: Annotated[
        Seconds,
        Meta(
            description="How long a slot stays with a writer that has died. Slow writes renew "
            "their leases."
        ),
    ] = 10.0
    wait_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="How long a set waits for pages that others are writing, or for slots that "
            "are quarantined.",
        ),
    ] = 1.0
    pin_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="Pin pages while they are read, for so long at most, so that they are not "
            "evicted under the reader, which "
            "would be a miss. 0 for no pins.",
        ),
    ] = 0.0
    timeout_seconds: Annotated[
        Seconds,
        Meta(
            description="How long the metadata server may take over what has no deadline, such as "
            "open."
        ),
    ] = 5.0
    quarantine_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="How long freed slots stay in quarantine before they are used again, "
            "without a metadata server.",
        ),
    ] = 0.1
    verify_checksums: Annotated[
        bool,
        Meta(
            description="Verify the checksum over the bytes of each page that is read. Without it, "
            "only the envelope is verified: length, "
            "identity, key, and the checksum that the server names. Bytes that were torn by a loss "
            "of power, overwritten by a write "
            "that had stalled, or have rotted are then delivered."
        ),
    ] = True
    metrics: Annotated[
        bool, Meta(description="Count pages, bytes and latencies. Faults are always counted.")
    ] = True
    metadata_ca: Annotated[
        str,
        Meta(
            description="PEM file of the authorities that a metadata server at https:// is judged "
            "by. By default the system's."
        ),
    ] = ""
    metadata_certificate: Annotated[
        str,
        Meta(
            description="PEM file of the certificate that this client shows to a metadata server "
            "at https://."
        ),
    ] = ""
    metadata_key: Annotated[
        str,
        Meta(
            description="PEM file of its key. By default the key is in the file of the certificate."
        ),
    ] = ""

    def __post_init__(self) -> None:
        check_path(self.path)
        for name in ("file_size", "usrbio_buffer"):
            try:
                size = parse_bytes(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            if not size:
                raise ValueError(f"{name} must not be 0")
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
        """Addresses of the metadata servers; empty for embedded metadata."""
        return () if self.metadata_url in (None, "") else addresses(self.metadata_url)

    @property
    def file_bytes(self) -> int:
        """`file_size` in bytes."""
        return parse_bytes(self.file_size)

    @property
    def usrbio_buffer_bytes(self) -> int:
        """`usrbio_buffer` in bytes."""
        return parse_bytes(self.usrbio_buffer)

    @property
    def bearer(self) -> str:
        """The token, of the option or of the environment variable."""
        return self.token or os.environ.get(TOKEN_VARIABLE, "")
