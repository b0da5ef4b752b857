"""Host pools that the cases register, and the pages in them.

Pages are self-describing: a wrong byte identifies the page that it comes from.

A page is a row of cells of 16 bytes, the last of which may be cut short:

```
offset  bytes  field
0       4      digest of identity and pool
4       6      digest of the key
10      2      generation: which set wrote it
12      4      offset of this cell in the page
```
"""

from __future__ import annotations

import hashlib
import os
import struct
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, Final

from hicache_conformance.model.settings import PAGE_VARIABLE
from hicache_storage.spec import HostPool, PageGeometry, PoolName

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch

    from hicache_storage.spec import StorageIdentity


CELL_BYTES = 16
_CELL = struct.Struct("<4s6sHI")


@dataclass(frozen=True, slots=True)
class Page:
    """Description of a page: its owner, pool, key and generation."""

    identity: StorageIdentity
    pool: str
    key: str
    generation: int = 0
    start: int = 0
    """Offset of its first byte in the page that it is a part of; a multiple of the cell."""


class PagePatterns:
    """Writes pages, and reads from any bytes whose they are.

    Knows the pages that were written with it.
    """

    def __init__(self) -> None:
        self._owners: dict[bytes, tuple[StorageIdentity, str]] = {}
        self._keys = dict[bytes, str]()
        self._tags: dict[tuple[StorageIdentity, str], bytes] = {}

    def render(self, page: Page, length: int) -> bytes:
        """The bytes of a page."""
        head = self._owner_tag(page.identity, page.pool) + self._key_tag(page.key)
        cells = (
            _CELL.pack(head[:4], head[4:], page.generation, offset)
            for offset in range(page.start, page.start + length, CELL_BYTES)
        )
        return b"".join(cells)[:length]

    def explain(self, found: bytes, expected: Page) -> str:
        """Describe the content of `found` where it is not `expected`; empty where it is."""
        wanted = self.render(expected, len(found))
        if found == wanted:
            return ""
        offset = next(
            index for index, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b
        )
        start = offset // CELL_BYTES * CELL_BYTES
        wrong = sum(a != b for a, b in zip(found, wanted, strict=True))
        return f"{self._describe(found[start : start + CELL_BYTES], start, expected)} ({wrong} of {len(found)} bytes differ)"

    def generations(self, found: bytes) -> list[int]:
        """The generations that the cells of a page name, each once; its first cell's comes first."""
        cells = _CELL.iter_unpack(found[: len(found) // CELL_BYTES * CELL_BYTES])
        return list(dict.fromkeys(int(cell[2]) for cell in cells))

    def generation(self, found: bytes, page: Page) -> int | None:
        """Return the generation of `page` that `found` is as a whole; None where it is none."""
        for generation in self.generations(found)[:1]:
            if self.render(replace(page, generation=generation), len(found)) == found:
                return generation
        return None

    def _describe(self, cell: bytes, offset: int, expected: Page) -> str:
        at = f"at byte {offset}"
        if not any(cell):
            return f"holds zeros {at}"
        if len(cell) < CELL_BYTES:
            return f"differs in its last {len(cell)} bytes"
        owner_tag, key_tag, generation, place = _CELL.unpack(cell)
        if cell.startswith(CANARY_MARK):
            return f"was not written {at}: it holds what the destination held before the call"
        if cell.startswith(SPENT_MARK):
            return f"holds, {at}, what its writer put into the host page after the set had returned"
        if owner_tag not in self._owners or key_tag not in self._keys:
            return f"holds bytes of no page of this run {at}: {cell.hex()}"
        found = Page(*self._owners[owner_tag], self._keys[key_tag], generation)
        return f"{_difference(found, expected)} {at}" + (
            "" if place == expected.start + offset else f", taken from byte {place} of that page"
        )

    def _owner_tag(self, identity: StorageIdentity, pool: str) -> bytes:
        tag = self._tags.get((identity, pool))
        if tag is None:
            # Every field, deciding or not: two identities that share pages still wrote their own
            # bytes.
            text = repr((identity, pool)).encode()
            tag = self._tags[identity, pool] = hashlib.blake2b(
                text, digest_size=4, person=b"owner"
            ).digest()
            self._owners[tag] = (identity, pool)
        return tag

    def _key_tag(self, key: str) -> bytes:
        tag = hashlib.blake2b(key.encode(), digest_size=6, person=b"key").digest()
        self._keys.setdefault(tag, key)
        return tag


CANARY_MARK = b"\xc5CANARY\xc5"
SPENT_MARK = b"\xc5SPENT!\xc5"


def canary(call: int, length: int) -> bytes:
    """Return the bytes of destinations and their neighbours before a get.

    They differ from call to call.
    """
    cell = CANARY_MARK + struct.pack("<Q", call)
    return (cell * (length // CELL_BYTES + 1))[:length]


def spent(length: int) -> bytes:
    """Return the bytes that overwrite a source page as soon as the set has returned."""
    return (SPENT_MARK * (length // len(SPENT_MARK) + 1))[:length]


def differing_fields(found: StorageIdentity, expected: StorageIdentity) -> str:
    """Name the fields in which two identities differ, each with both values."""
    return ", ".join(
        f"{field.name} {getattr(found, field.name)!r} (expected {getattr(expected, field.name)!r})"
        for field in fields(found)
        if getattr(found, field.name) != getattr(expected, field.name)
    )


def short(key: str) -> str:
    """A key as messages show it."""
    return repr(key if len(key) <= 60 else f"{key[:40]}...{key[-12:]}")


def _difference(found: Page, expected: Page) -> str:
    words = list[str]()
    if found.key != expected.key:
        words.append(f"holds bytes of key {short(found.key)}")
    if found.pool != expected.pool:
        words.append(f"holds bytes of pool {found.pool!r}")
    if found.identity != expected.identity:
        words.append(
            f"holds bytes written under {differing_fields(found.identity, expected.identity)}"
        )
    if not words and found.generation != expected.generation:
        words.append(
            f"holds the bytes of set number {found.generation} of this key, not of number "
            f"{expected.generation}"
        )
    return " and ".join(words) or "holds its own bytes in the wrong place"


# Host pools
# ------------------------------------------------------------------------------------------------


GUARD_BYTES = 64
GUARD = b"\xa7" * GUARD_BYTES
SMALL_PAGE: Final = 128
"""Bytes of a case's page that become one unit: the usual page of 256 bytes becomes two, so that half
of it is a page, too."""
MAX_SMALL_UNITS: Final = 4
"""Pages of up to so many times `SMALL_PAGE` grow like that; longer ones are rounded up."""


def page_components(components: Sequence[int], unit: int) -> tuple[int, ...]:
    """The bytes of each component of a page, when pages are multiples of `unit` bytes.

    Half a page stays half as long, and the components keep their proportions.

    Args:
        components: bytes of each component that a case asks for.
        unit: bytes; 0 for pages of any length.
    """
    length = sum(components)
    if not unit or length % unit == 0:
        return tuple(components)
    small = -(-length // SMALL_PAGE)
    units = small if small <= MAX_SMALL_UNITS else -(-length // unit)
    ends = [
        sum(components[: index + 1]) * units * unit // length for index in range(len(components))
    ]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


class PoolMemory(ABC):
    """A registered pool, seen by the suite.

    Not through the driver, and not through the SDK's adapters.
    """

    pages: int
    page_size: int
    page_bytes: int
    first_byte: int = 0
    """Offset of a page's first byte in the whole model's page, of which it may be a part."""

    @property
    def host_pool(self) -> object:
        """The object to register."""
        return self

    @abstractmethod
    def read(self, page: int) -> bytes:
        """The bytes of a page, all components one after the other."""

    @abstractmethod
    def write(self, page: int, content: bytes) -> None:
        """Replace the bytes of a page."""

    def guards_intact(self) -> bool:
        """Return whether the bytes before and behind the pool's memory are unchanged."""
        return True

    def read_all(self, pages: Iterable[int]) -> list[bytes]:
        """Return the bytes of each page."""
        return [self.read(page) for page in pages]

    def fill(self, pages: Iterable[int], content: bytes) -> None:
        """Write the same content to all pages."""
        for page in pages:
            self.write(page, content)

    def changed(self, pages: Iterable[int], content: bytes) -> list[int]:
        """Return the pages whose bytes differ from `content`."""
        return [page for page in pages if self.read(page) != content]


def spread(content: bytes, buffers: Iterable[memoryview]) -> None:
    """Write a page to the buffers of its components, one after the other."""
    start = 0
    for buffer in buffers:
        buffer[:] = content[start : start + len(buffer)]
        start += len(buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """Arguments of a `GuardedPool` that another process makes for itself."""

    pages: int = 64
    page_size: int = 2
    components: tuple[int, ...] = (96, 160)


class GuardedPool(PoolMemory):
    """A `HostPool` whose components lie in separate memory, each between two guards.

    Args:
        components: bytes of each component of a page; the next multiple of the run's page length,
            where it has one.
        exact: keep these lengths whatever the run asks for.
        skew: bytes that every component's memory is off alignment.
        layout, dtype: as the geometry tells them.
    """

    def __init__(
        self,
        *,
        pages: int = 64,
        page_size: int = 2,
        components: Sequence[int] = (96, 160),
        exact: bool = False,
        skew: int = 0,
        layout: str = "page_first",
        dtype: str = "uint8",
    ) -> None:
        if not exact:
            # From the environment, because workers make pools of their own.
            components = page_components(components, int(os.environ.get(PAGE_VARIABLE) or 0))
        self.geometry = PageGeometry(layout, dtype, page_size, pages * page_size, tuple(components))
        self.pages = pages
        self.page_size = page_size
        self.page_bytes = self.geometry.page_bytes
        self._start = GUARD_BYTES + skew
        self._memory = [
            # Guards around each component, so that a copy which is a few bytes too long is found
            # (GET-2).
            memoryview(bytearray(b"\0" * skew + GUARD + bytes(pages * length) + GUARD))
            for length in components
        ]

    def page_buffers(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        return [self._page(slot // self.page_size) for slot in first_slots]

    def read(self, page: int) -> bytes:
        return b"".join(self._page(page))

    def write(self, page: int, content: bytes) -> None:
        spread(content, self._page(page))

    def guards_intact(self) -> bool:
        return all(
            bytes(memory[self._start - GUARD_BYTES : self._start])
            == bytes(memory[-GUARD_BYTES:])
            == GUARD
            for memory in self._memory
        )

    def components_at(self, page: int, lengths: Sequence[int]) -> list[memoryview]:
        """A page's share of each component's memory."""
        return [
            memory[self._start + page * length : self._start + (page + 1) * length]
            for memory, length in zip(self._memory, lengths, strict=True)
        ]

    def _page(self, page: int) -> list[memoryview]:
        return self.components_at(page, self.geometry.component_bytes)


def make_pools(shapes: Mapping[str, PoolShape]) -> dict[str, PoolMemory]:
    """Make a pool of each shape, by its name."""
    return {name: GuardedPool(**asdict(shape)) for name, shape in shapes.items()}


def kv_and_state() -> dict[str, PoolMemory]:
    """A pool of KV, and one of states with one slot a page."""
    return {
        PoolName.KV: GuardedPool(),
        PoolName.MAMBA: GuardedPool(page_size=1, components=(80, 24)),
    }


class HeadsPool(GuardedPool):
    """The KV heads of one rank, in one of SGLang's layouts.

    The bytes of a page, as the suite reads and writes them, are ordered by heads, whatever the
    layout. So the pages of all ranks are consecutive parts of the whole model's page.

    Args:
        first: number of the first of them in the model.
        layout: one of `LAYOUTS`.
    """

    LAYOUTS: ClassVar[tuple[str, ...]] = (
        "page_head",
        "page_first",
        "page_first_direct",
        "layer_first",
    )
    _PAGE_SIZE, _LAYERS = 2, 2

    def __init__(
        self, *, heads: int, first: int = 0, layout: str = "page_head", pages: int = 12
    ) -> None:
        unit = int(os.environ.get(PAGE_VARIABLE) or 0)
        # Of one head in one row; K and V differ, so that one in the place of the other is noticed.
        widths = (unit, unit) if unit else (CELL_BYTES, 2 * CELL_BYTES)
        layers = self._LAYERS if layout == "layer_first" else 1
        rows = {"layer_first": self._PAGE_SIZE, "page_head": 1}.get(
            layout, self._PAGE_SIZE * self._LAYERS
        )
        components = [rows * heads * width for _ in range(layers) for width in widths]
        super().__init__(
            pages=pages, page_size=self._PAGE_SIZE, components=components, exact=True, layout=layout
        )
        self.geometry = replace(self.geometry, head_num=heads, head_rows=(rows,) * len(components))
        self.head_bytes = self.page_bytes // heads
        """Bytes of one head of a page."""
        self.first_byte = first * self.head_bytes
        self._heads = heads
        self._rows = rows

    def read(self, page: int) -> bytes:
        return b"".join(self._cells(page))

    def write(self, page: int, content: bytes) -> None:
        spread(content, self._cells(page))

    def _cells(self, page: int) -> Iterator[memoryview]:
        """What the pool holds of a page of each head, head after head."""
        components = self._page(page)
        for head in range(self._heads):
            for view in components:
                width = len(view) // self._rows // self._heads
                for row in range(self._rows):
                    start = (row * self._heads + head) * width
                    yield view[start : start + width]


class LentMemory(PoolMemory):
    """The pages of any `HostPool`, such as the SDK's own."""

    def __init__(self, pool: HostPool) -> None:
        geometry = pool.geometry
        self._pool = pool
        self.page_size = geometry.page_size
        self.page_bytes = geometry.page_bytes
        self.pages = geometry.size // geometry.page_size

    @property
    def host_pool(self) -> object:
        return self._pool

    def read(self, page: int) -> bytes:
        return b"".join(map(bytes, self._pool.page_buffers([page * self.page_size])[0]))

    def write(self, page: int, content: bytes) -> None:
        spread(content, self._pool.page_buffers([page * self.page_size])[0])


class EngineHostPool(PoolMemory):
    """A pool as an engine has it (SGLang's `layer_first`).

    One strided tensor, no addresses, and flat pages that are copies.
    """

    layout = "layer_first"

    def __init__(
        self, *, pages: int = 16, page_size: int = 2, layers: int = 3, row: int = 32
    ) -> None:
        import torch

        self.dtype = torch.uint8
        self.page_size = page_size
        self.pages = pages
        self.size = pages * page_size
        # Every second row belongs to somebody else, so that not even one layer of a page is
        # contiguous.
        self.kv_buffer = torch.full((layers, self.size, 2, row), GUARD[0], dtype=self.dtype)
        self.page_bytes = layers * page_size * row

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """The page at slot `index`: a strided view, or, flat, a copy."""
        page = self.kv_buffer[:, index : index + self.page_size, 0]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """A blank flat page."""
        return self.kv_buffer.new_zeros(self.page_bytes)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Copy a flat page in."""
        page = self.kv_buffer[:, index : index + self.page_size, 0]
        page.copy_(data_page.view(page.shape))

    def read(self, page: int) -> bytes:
        return b"".join(
            bytes([int(element)]) for element in self.get_data_page(page * self.page_size)
        )

    def write(self, page: int, content: bytes) -> None:
        import torch

        self.set_from_flat_data_page(
            page * self.page_size, torch.frombuffer(bytearray(content), dtype=torch.uint8)
        )

    def guards_intact(self) -> bool:
        return bool((self.kv_buffer[:, :, 1] == GUARD[0]).all())


def slots_of(pages: Sequence[int], page_size: int) -> torch.Tensor:
    """The slots of whole pages, as `PoolTransfer.host_indices` wants them."""
    import torch

    return torch.tensor(
        [page * page_size + slot for page in pages for slot in range(page_size)], dtype=torch.int64
    )
