"""Files of access control: digests of tokens and their rights in JSON, quotas of tenants in TOML."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, Literal

import msgspec
from msgspec import Meta, Struct, structs

from hicache_metadata_server.core.limits import NAME, Quota, Quotas
from hicache_storage.spec.config import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

PREFIX: Final = "hmt_"
"""Prefix of generated tokens, so that secret scanners can recognize them."""
TOKEN_BYTES: Final = 32
WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH

Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$(?!\n)")]
TenantName = Annotated[str, Meta(pattern=rf"^({NAME})?$(?!\n)")]


class TokenRecord(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One token: its digest, right, tenant and expiry."""

    id: Id
    """Name in the audit log."""
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]
    right: Literal["read", "write", "admin"]
    tenant: TenantName = ""
    """Tenant whose scopes it is for. Empty: scopes without a tenant; with the right admin, all."""
    created: datetime
    expires: datetime | None = None


class TokenFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a token file."""

    version: Literal[1] = 1
    tokens: list[TokenRecord] = []


class TenantsFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a tenants file. Quotas are decoded one by one, so that errors name the tenant."""

    default: dict[str, Any] = {}
    tenants: dict[Annotated[str, Meta(pattern=rf"^{NAME}$(?!\n)")], dict[str, Any]] = {}


class TokenFileError(ValueError):
    """Invalid token file; the message contains nothing of its content."""


def digest(token: bytes) -> bytes:
    """SHA-256 of a token."""
    # No salt and no slow hash: against guessing 256 random bits, neither helps, and the digest is
    # computed in every request.
    return hashlib.sha256(token).digest()


def new_token() -> str:
    """Generate a token with 256 random bits."""
    return PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def record_of(
    token: str,
    right: str,
    *,
    name: str = "",
    tenant: str = "",
    expires: datetime | None = None,
    now: datetime | None = None,
) -> TokenRecord:
    """Make the record of a token.

    Raises:
        TokenFileError: invalid right, name or tenant.
    """
    made = {
        "id": name or secrets.token_hex(4),
        "sha256": digest(token.encode()).hex(),
        "right": right,
        "tenant": tenant,
        "created": (now or datetime.now(UTC)).replace(microsecond=0),
        "expires": expires,
    }
    try:
        return msgspec.convert(made, TokenRecord)
    except msgspec.ValidationError as error:
        raise TokenFileError(f"no such token can be made: {error}") from error


def read_token_file(path: Path) -> list[TokenRecord]:
    """Read the records of a token file.

    Raises:
        TokenFileError: the content is invalid, or others than the owner may change the file.
        OSError: the file cannot be read.
    """
    content = _content(path)
    try:
        found = msgspec.json.decode(content, type=TokenFile).tokens
    except (msgspec.DecodeError, UnicodeError) as error:
        raise TokenFileError(f"{path} is no file of tokens: {error}") from error
    for what in ("id", "sha256"):
        values = [getattr(record, what) for record in found]
        if len(set(values)) < len(values):
            raise TokenFileError(f"{path} has two tokens of the same {what}")
    return [
        structs.replace(record, expires=when.replace(tzinfo=when.tzinfo or UTC)) if when else record
        for record, when in ((record, record.expires) for record in found)
    ]


def readable_by_all(path: Path) -> bool:
    """Return True if every user of the machine can read a file."""
    return bool(path.stat().st_mode & stat.S_IROTH)


@contextlib.contextmanager
def edit_token_file(path: Path) -> Generator[dict[str, TokenRecord]]:
    """Edit the records of a token file, by their ids.

    The file is replaced atomically when the block ends without an error. A file that is missing or
    empty has no records. An existing file keeps its owner; a new one gets mode 600.

    Raises:
        TokenFileError: the content is invalid.
        OSError: the file cannot be read or written.
    """
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # A lock on the directory and not on the file, which is replaced by another one: a second
        # process could lock the old file and lose the first one's change.
        fcntl.flock(directory, fcntl.LOCK_EX)
        there = path.stat() if path.exists() else None
        tokens = {
            record.id: record
            for record in (read_token_file(path) if there and there.st_size else [])
        }
        yield tokens
        _replace(path, encode_tokens(list(tokens.values())), there)
        # Without it, a machine that crashes now could bring a revoked token back.
        os.fsync(directory)
    finally:
        os.close(directory)


@contextlib.contextmanager
def new_file(path: Path) -> Generator[BinaryIO]:
    """Create a file of mode 600, and remove it if the block ends with an error.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            # A umask may have removed bits of the mode: the owner must be able to read it.
            os.fchmod(descriptor, 0o600)
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def encode_tokens(records: list[TokenRecord]) -> bytes:
    """Encode the content of a token file."""
    return msgspec.json.format(msgspec.json.encode(TokenFile(tokens=records)), indent=1) + b"\n"


def _replace(path: Path, content: bytes, there: os.stat_result | None) -> None:
    # In the same directory, because a rename is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with new_file(temporary) as file:
        file.write(content)
        file.flush()
        if there is not None:
            # Root may edit the file of the account that the server runs as.
            if (there.st_uid, there.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(file.fileno(), there.st_uid, there.st_gid)
            os.fchmod(file.fileno(), there.st_mode & 0o640)
        # Before the rename: otherwise a crash can leave an empty file under the name.
        os.fsync(file.fileno())
        temporary.replace(path)


def read_tenants_file(path: Path) -> Quotas:
    """Read the quotas of a tenants file.

    Raises:
        ValueError: the content is invalid, or others than the owner may change the file.
        OSError: the file cannot be read.
    """
    content, where = _content(path), "the file"
    try:
        found = msgspec.toml.decode(content, type=TenantsFile)
        quotas: dict[str, Quota] = {}
        for name, table in (("", found.default), *found.tenants.items()):
            where = f"tenants.{name}" if name else "default"
            if isinstance(size := table.get("max_bytes"), str):
                table["max_bytes"] = parse_bytes(size)
            quotas[name] = msgspec.convert(table, Quota)
    except ValueError as error:
        raise ValueError(f"{path}: {where}: {error}") from error
    return Quotas(default=quotas.pop(""), by_tenant=quotas)


def _content(path: Path) -> bytes:
    """Read a file that its owner alone may change."""
    with path.open("rb") as file:
        # The open file's mode and not the path's, which may name another file by now.
        if os.fstat(file.fileno()).st_mode & WRITABLE_BY_OTHERS:
            raise TokenFileError(
                f"{path} may be changed by others than its owner: chmod go-w {path}"
            )
        return file.read()
