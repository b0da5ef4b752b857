"""Sizes of model and pools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch

from hicache_storage.hybrid import PrefetchPolicy, PrefetchRules


class Common(TypedDict):
    """The options that stacks of all kinds have."""

    page_size: int
    device_tokens: int
    host_tokens: int
    device: str
    prefetch: PrefetchRules


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The model's weights and the machine. Lengths in tokens."""

    device_tokens: int
    host_tokens: int
    device_states: int
    host_states: int
    page: int = 16
    interval: int = 32
    """Between the checkpoints that states are kept at."""
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 1

    def common(self) -> Common:
        """For the config of a stack."""
        return {
            "page_size": self.page,
            "device_tokens": self.device_tokens,
            "host_tokens": self.host_tokens,
            "device": self.device,
            # Everything that is stored is waited for, so that what a turn restores does not depend
            # on the speed of a disk.
            "prefetch": PrefetchRules(
                policy=PrefetchPolicy.WAIT_COMPLETE, threshold_tokens=self.page, occupancy=1.0
            ),
        }
