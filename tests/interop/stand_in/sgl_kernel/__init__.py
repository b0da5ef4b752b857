"""Stands in for the compiled kernels that SGLang's CPU engine imports; there are none of them to
install for this machine.

What serving a small dense model calls is here, in torch; that of a hybrid one is in `mamba`.
Everything else can be imported, and raises when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sgl_kernel import mamba

if TYPE_CHECKING:
    from collections.abc import Callable

OPERATORS = (
    mamba.fused_gdn_gating_cpu,
    mamba.fused_qk_gemma_rmsnorm_cpu,
    mamba.fused_rmsnorm_gated_cpu,
    mamba.fused_sigmoid_gating_delta_rule_update_cpu,
)
"""What SGLang takes from `torch.ops.sgl_kernel`."""
OPERATORS_NOT_CALLED = (
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)
"""What it takes from there on import. There are no more, because it asks what there is to know what
the machine can do."""


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    slots_of_request: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    row_length: int,
) -> None:
    """Enter each request's new slots, which stand one request after another in `slots`, in its row
    from start to end."""
    at = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slots_of_request[request, start:end] = slots[at : at + end - start]
        at += end - start


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_args: object, **_options: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is not stood in for")

    return absent


for operator in OPERATORS:
    setattr(torch.ops.sgl_kernel, operator.__name__, operator)
for name in OPERATORS_NOT_CALLED:
    setattr(torch.ops.sgl_kernel, name, __getattr__(name))
