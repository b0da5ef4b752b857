"""Operations of a storage in memory that fail, and calls of its methods that are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def failing(error: BaseException, *operations: str) -> Callable[[str], None]:
    """Make a `before` of a `MemoryStorage` that raises in some operations, or in all."""

    def before(operation: str) -> None:
        if not operations or operation in operations:
            raise error

    return before


def kept_calls(storage: Any, method: str) -> list[Any]:
    """Keep the `Call` of each call of a driver's method from now on."""
    calls, inner = list[Any](), getattr(storage, method)

    def keep(batches: Any, call: Any) -> Any:
        calls.append(call)
        return inner(batches, call)

    setattr(storage, method, keep)
    return calls
