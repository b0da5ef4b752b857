"""A turn of a conversation while it is served, and what is told of it afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.hybrid.radix import PrefixLock


class Tier(StrEnum):
    """The slowest place that something of a prefix came from."""

    NONE = "none"
    """Nothing was restored."""
    L1 = "L1"
    """The device."""
    L2 = "L2"
    """The host."""
    L3 = "L3"
    """The storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Tokens of a prompt that were not computed, by the tier that held their KV."""

    device: int = 0
    host: int = 0
    storage: int = 0
    state_on_host: bool = False
    """Whether the state came from the host, perhaps without any KV."""

    @property
    def tokens(self) -> int:
        return self.device + self.host + self.storage

    @property
    def tier(self) -> Tier:
        if self.storage:
            return Tier.L3
        if self.host or self.state_on_host:
            return Tier.L2
        return Tier.L1 if self.device else Tier.NONE


@dataclass(eq=False)
class Request:
    """A turn: what the client says, and what the model answers."""

    name: str
    prompt: Sequence[int]
    output_length: int
    known: int = 0
    """How many tokens of it were on the device or the host when it began to wait."""
    tokens: list[int] = field(default_factory=list[int])
    """The prompt, and what was sampled."""
    computed: int = 0
    """Tokens whose cache is there; all but the last when the turn ends."""
    restored: Restored = Restored()
    rows: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """KV slots, whole pages."""
    cached: int = 0
    """How many tokens of `rows` are the cache's."""
    lock: PrefixLock | None = None
    slot: int = -1
    """State slots: its own, and that of the last checkpoint on the way."""
    checkpoint: int = -1
    kept: int = 0
    """After how many tokens that checkpoint is; 0 for none yet."""
    logits: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Of all tokens that were computed in this turn."""

    @property
    def usable(self) -> Sequence[int]:
        """Return the tokens that may come from the cache: the last one is always computed, for its
        logits."""
        return self.prompt[:-1]

    @property
    def answered(self) -> bool:
        return len(self.tokens) == len(self.prompt) + self.output_length
