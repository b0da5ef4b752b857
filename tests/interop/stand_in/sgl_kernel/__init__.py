"""Stands in for the compiled kernels that SGLang's CPU engine imports; there are none of them to install for this machine.

What serving a small dense model calls is here, in torch. Everything else can be imported, and raises when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    slots_of_request: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    row_length: int,
) -> None:
    """Enter each request's new slots, which stand one request after another in `slots`, in its row from start to end."""
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
