"""Names of the keys in Redis."""

from __future__ import annotations

from typing import Final

_PARTS: Final = (
    "meta",
    "slots",
    "live",
    "leased",
    "leases",
    "free",
    "expiring",
    "order",
    "aside",
    "resting",
    "children",
    "pins",
    "pinned",
    "holds",
    "detached",
)
SCOPES: Final = b"hm:{scopes}"
"""The list of scopes: a hash from name to geometry, identity and tenant."""


class ScopeKeys:
    """The keys of one scope, in the order in which every script takes them.

    They have one hash tag, so that a cluster keeps them on one node: a script can only use keys of
    its node.
    """

    __slots__ = ("all", "prefix")

    def __init__(self, scope: str) -> None:
        self.prefix = f"hm:{{{scope}}}:".encode()
        self.all = tuple(self.prefix + part.encode() for part in _PARTS)


def pin_key(pin: int) -> bytes:
    """Return the key of a pin's record: the scopes that it holds slots of."""
    return b"hm:{pin:%d}" % pin


def idempotency_redis_key(idempotency_key: str, prefix: bytes = b"hm:") -> bytes:
    """Return the key of the answers under an idempotency key.

    In a cluster each scope keeps its own answers, under its `prefix`.
    """
    return prefix + b"once:" + idempotency_key.encode()
