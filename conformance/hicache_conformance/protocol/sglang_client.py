"""Client of the compatible part, one scope at a time.

Checks that answers have their documented shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from hicache_conformance.model.violation import Violation
from hicache_conformance.protocol.http_client import expect, record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_conformance.protocol.http_client import HttpClient, Reply


@dataclass(frozen=True, slots=True)
class SglangScope:
    """A scope, which need not exist."""

    http: HttpClient
    rank: int
    namespace: str

    @property
    def name(self) -> str:
        """As the native part calls it."""
        return f"{self.rank}:{self.namespace}"

    def through(self, http: HttpClient) -> SglangScope:
        """The same scope, asked by another client."""
        return SglangScope(http, self.rank, self.namespace)

    def post(self, operation: str, **body: Any) -> Reply:
        """Send a body of any fields; the namespace is added where it is not given."""
        return self.http.post(f"/{self.rank}/{operation}", {"namespace": self.namespace, **body})

    def initialize(self, pages: int) -> None:
        """Make the scope."""
        expect(self.post("initialize", num_pages=pages), "MD-INIT-1", 204)

    def exists(self, keys: Sequence[str], rule: str = "MD-FIND-1") -> list[bool]:
        """Return for each key whether it is there."""
        reply = self.post("exists", keys=list(keys))
        return self._column(reply, "exists", len(keys), rule, _is_bool, "true or false")

    def indices(self, keys: Sequence[str], rule: str = "MD-FIND-1") -> list[int | None]:
        """The slot of each key, or None."""
        reply = self.post("get_page_indices", keys=list(keys))
        return self._column(reply, "indices", len(keys), rule, _is_slot, "a slot or null")

    def reserve(
        self, keys: Sequence[str], prefixes: Sequence[str] = (), rule: str = "MD-RES-1"
    ) -> list[tuple[bool, int]]:
        """For each key, whether it is there already, and its slot or -1."""
        # The unchanged client of the engine sends an empty prefix for the first page of a chain.
        pairs = list(zip(keys, prefixes or [""] * len(keys), strict=True))
        reply = self.post("reserve_and_allocate_page_indices", keys=pairs)
        answer = self._column(
            reply, "indices", len(keys), rule, _is_reservation, "a pair of a flag and a slot or -1"
        )
        return [(exists, index) for exists, index in answer]

    def confirm(
        self,
        written: Sequence[tuple[str, int]] = (),
        released: Sequence[int] = (),
        rule: str = "MD-CONF-1",
    ) -> None:
        """Make reserved slots live, give others back."""
        expect(self.try_confirm(written, released), rule, 204)

    def try_confirm(
        self, written: Sequence[tuple[str, int]] = (), released: Sequence[int] = ()
    ) -> Reply:
        """The same, for what may be refused."""
        return self.post(
            "confirm_write", written_keys_to_confirm=list(written), pages_to_release=list(released)
        )

    def delete(self, keys: Sequence[str]) -> None:
        """Make keys go."""
        expect(self.post("delete_keys", keys=list(keys)), "MD-DEL-1", 204)

    def clear(self) -> None:
        """Make everything go."""
        expect(self.post("clear"), "MD-DEL-2", 204)

    def store(self, keys: Sequence[str], rule: str = "MD-CONF-1") -> list[int]:
        """Reserve and confirm keys for which there is room; returns their slots.

        Raises:
            Violation: one got no slot.
        """
        answer = self.reserve(keys)
        for key, (exists, index) in zip(keys, answer, strict=True):
            if exists or index < 0:
                raise Violation(
                    rule,
                    f"new key {key[:16]}... gets {[exists, index]} from a scope that has room for "
                    f"it",
                )
        self.confirm(
            [(key, index) for key, (_, index) in zip(keys, answer, strict=True)], rule=rule
        )
        return [index for _, index in answer]

    def _column(
        self,
        reply: Reply,
        name: str,
        length: int,
        rule: str,
        is_right: Callable[[Any], bool],
        what: str,
    ) -> list[Any]:
        column = _listed(record(expect(reply, rule, 200), rule).get(name))
        # The length first. An answer without the keys that are not there has the right entries in
        # the wrong places (MD-FIND-1).
        if column is None or len(column) != length:
            raise Violation(rule, f"{reply}: expected {name!r} with {length} entries")
        wrong = next((i for i, entry in enumerate(column) if not is_right(entry)), None)
        if wrong is not None:
            raise Violation(
                rule, f"{reply}: entry {wrong} of {name!r} is {column[wrong]!r}, not {what}"
            )
        return column


def _listed(value: object) -> list[Any] | None:
    return msgspec.convert(value, list[Any]) if isinstance(value, list) else None


def _is_bool(entry: object) -> bool:
    return isinstance(entry, bool)


def _is_slot(entry: object) -> bool:
    return entry is None or _is_int(entry)


def _is_int(entry: object) -> bool:
    # A bool is an int in Python, and `true` in the place of a slot would pass for slot 1.
    return isinstance(entry, int) and not isinstance(entry, bool)


def _is_reservation(entry: Any) -> bool:
    pair = _listed(entry)
    return (
        pair is not None
        and len(pair) == 2
        and isinstance(pair[0], bool)
        and _is_int(pair[1])
        and pair[1] >= -1
    )
