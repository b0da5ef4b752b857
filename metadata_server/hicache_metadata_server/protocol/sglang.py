"""Messages of SGLang's protocol. Unknown fields are ignored, as by SGLang's own server."""

from __future__ import annotations

from typing import Final

from msgspec import Struct, field

from hicache_metadata_server.protocol.elements import Key, Namespace, Natural, Slots, Token


# Plain structs, not `Request`: unknown fields of SGLang's clients must not be refused.
class SglangInitialize(Struct, frozen=True, kw_only=True):
    """`POST /{rank}/initialize`."""

    num_pages: Slots
    namespace: Namespace = "kv"


class SglangKeys(Struct, frozen=True, kw_only=True):
    """`POST /{rank}/exists`, `/{rank}/get_page_indices` and `/{rank}/delete_keys`."""

    keys: list[Key]
    namespace: Namespace = "kv"


class SglangReserve(Struct, frozen=True, kw_only=True):
    """`POST /{rank}/reserve_and_allocate_page_indices`: pairs of a key and its prefix.

    The prefix is the key before it in its chain, "" at the head.
    """

    keys: list[tuple[Key, str]]
    namespace: Namespace = "kv"


class SglangConfirm(Struct, frozen=True, kw_only=True):
    """`POST /{rank}/confirm_write`: pairs of a key and its slot, and slots to give back."""

    # Keys and slots: this protocol has no leases that a confirm could name.
    written_keys_to_confirm: list[tuple[Key, Natural]] = field(
        default_factory=list[tuple[str, int]]
    )
    pages_to_release: list[Natural] = field(default_factory=list[int])
    namespace: Namespace = "kv"


class SglangClear(Struct, frozen=True, kw_only=True):
    """`POST /{rank}/clear`."""

    namespace: Namespace = "kv"


# Reads need a token of the right READ only, though `exists` marks pages as used.
SGLANG_ROUTES: Final[dict[str, tuple[type[Struct], Token]]] = {
    "initialize": (SglangInitialize, Token.WRITE),
    "exists": (SglangKeys, Token.READ),
    "reserve_and_allocate_page_indices": (SglangReserve, Token.WRITE),
    "confirm_write": (SglangConfirm, Token.WRITE),
    "get_page_indices": (SglangKeys, Token.READ),
    "delete_keys": (SglangKeys, Token.WRITE),
    "clear": (SglangClear, Token.WRITE),
}
