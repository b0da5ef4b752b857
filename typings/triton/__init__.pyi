# As much of Triton as the kernel of hicache_storage.transfer uses; it need not be installed.
from collections.abc import Callable, Sequence
from typing import Any

class JITFunction:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...

def jit(
    *, do_not_specialize: Sequence[str] = ...
) -> Callable[[Callable[..., Any]], JITFunction]: ...
