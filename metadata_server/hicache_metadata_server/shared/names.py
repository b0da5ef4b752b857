"""What the keys in Redis are called."""

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
"""A hash: name -> what the scope is made of."""


class ScopeKeys:
    """The keys of one scope, in the order in which every script takes them. They carry one hash
    tag, so that a cluster keeps them together."""

    __slots__ = ("all", "prefix")

    def __init__(self, scope: str) -> None:
        self.prefix = f"hm:{{{scope}}}:".encode()
        self.all = tuple(self.prefix + part.encode() for part in _PARTS)


def pin_key(pin: int) -> bytes:
    """Which scopes a pin holds slots of."""
    return b"hm:{pin:%d}" % pin


def idempotency_redis_key(idempotency_key: str, prefix: bytes = b"hm:") -> bytes:
    """First answers under an idempotency key; of one scope, where `prefix` is its own."""
    return prefix + b"once:" + idempotency_key.encode()
