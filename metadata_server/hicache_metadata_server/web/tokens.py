"""Who may do what."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.protocol import Token
from hicache_metadata_server.service.refused import RefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_RANK: Final = {token: rank for rank, token in enumerate(Token)}


class Tokens:
    """Bearer tokens; without any, everything is permitted."""

    def __init__(self, tokens: Mapping[str, Token] | None = None) -> None:
        # By their digest: how long a comparison takes tells nothing about a token.
        self._by_digest = {_digest(token.encode()): kind for token, kind in (tokens or {}).items()}

    def __bool__(self) -> bool:
        return bool(self._by_digest)

    def check(self, authorization: bytes, needed: Token) -> None:
        """See that a request may be done.

        Raises:
            RefusedError: 401 without a known token, 403 with one that permits less.
        """
        if not self._by_digest or needed is Token.NONE:
            return
        kind, _, token = authorization.partition(b" ")
        given = self._by_digest.get(_digest(token.strip())) if kind.lower() == b"bearer" else None
        if given is None:
            raise RefusedError(401, "unauthorized", "this server wants a bearer token that it knows", "Authorization")
        if _RANK[given] < _RANK[needed]:
            raise RefusedError(403, "forbidden", f"this token permits {given}, and that needs {needed}", "Authorization")


def read_token_file(path: Path) -> dict[str, Token]:
    """Tokens from lines of `read|write|admin TOKEN`; empty lines and those that begin with # say nothing.

    Raises:
        ValueError: a line is not of that form, or a token stands twice.
        OSError: the file cannot be read.
    """
    found: dict[str, Token] = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[0] not in (Token.READ, Token.WRITE, Token.ADMIN):
            raise ValueError(f"{path}, line {number}: expected read, write or admin, and a token")
        if words[1] in found:
            raise ValueError(f"{path}, line {number}: this token is there already")
        found[words[1]] = Token(words[0])
    return found


def _digest(token: bytes) -> bytes:
    return hashlib.blake2b(token, digest_size=16).digest()
