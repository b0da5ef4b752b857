"""Page keys in SGLang's scheme, so that both engines find each other's pages."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

from hicache_storage.spec import InvalidTransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKEN_BYTES = 4
_NAMESPACE = b"sglang-cache-namespace-v1"


def page_hashes(tokens: Sequence[int], page_size: int, *, prior: str | None = None) -> list[str]:
    """Return the keys of the whole pages of a sequence.

    A partial page at the end has no key.

    A key is the sha256 of the digest of the page before and the page's tokens.

    Args:
        tokens: ids in [0, 2**32).
        page_size: tokens per page.
        prior: key of the page before the first, or the seed of a namespace; None at the start of a
            plain sequence.

    Returns:
        64 hex digits for each page.

    Raises:
        InvalidTransferError: a token is out of range, or `prior` is not hex.
    """
    try:
        data = struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error as error:
        raise InvalidTransferError(f"tokens must be ids in [0, 2**32): {error}") from error
    page_bytes = page_size * TOKEN_BYTES
    try:
        digest = bytes.fromhex(prior) if prior is not None else b""
    except ValueError as error:
        raise InvalidTransferError(
            f"prior must be a page key of hex digits, got {prior!r:.80}"
        ) from error
    keys = list[str]()
    for start in range(0, len(data) // page_bytes * page_bytes, page_bytes):
        digest = hashlib.sha256(digest + data[start : start + page_bytes]).digest()
        keys.append(digest.hex())
    return keys


def namespace_seed(extra_key: str | None = None, cache_salt: str | None = None) -> str | None:
    """Return the seed of a namespace, the `prior` of its first page key.

    Sequences of different namespaces share no pages.

    Args:
        extra_key: any input besides the tokens that changes the KV, such as a LoRA adapter's name.
        cache_salt: text of a tenant that shares no pages.

    Returns:
        None where both are None: the sequence is in the common namespace.
    """
    if extra_key is None and cache_salt is None:
        return None
    digest = hashlib.sha256(_NAMESPACE)
    for part in (extra_key, cache_salt):
        if part is None:
            digest.update(b"\x00")
        else:
            # With a marker and the length, so that no two pairs of texts have the same bytes.
            text = part.encode()
            digest.update(b"\x01" + len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()
