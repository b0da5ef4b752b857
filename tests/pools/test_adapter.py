"""`page_access`: pools that lend their memory, those that copy, and those that can do nothing."""

from __future__ import annotations

from enum import Enum
from itertools import compress
from types import SimpleNamespace

import pytest
import torch

from hicache_storage.pools import PagedHostPool, page_access
from hicache_storage.pools.adapter import LentPages
from hicache_storage.pools.engine import AddressedPages, StagedPages
from hicache_storage.spec import InvalidPoolError, PageGeometry
from tests.pools.foreign import (
    PAGES,
    WIDTH,
    AddressPool,
    Attributes,
    FlatPool,
    P,
    WithoutAddresses,
    read,
    some_pages,
    write,
)
from tests.support.pools import make_pool


def own_pool(**fields):
    shape = {"layers": range(2), "kv_lora_rank": 3, "dtype": torch.bfloat16}
    return make_pool(PagedHostPool, "mla", **{"size": 8, "page_size": 4, **shape, **fields})


def changed(pool, **attributes):
    for name, value in attributes.items():
        setattr(pool, name, value)
    return pool


# Pools that lend
# ---------------------------------------------------------------------------------------------


def test_pools_of_the_sdk_lend_their_memory():
    pool = own_pool()
    access, slots = page_access(pool), [4, 0]
    assert isinstance(access, LentPages)
    assert access.geometry == pool.geometry
    write(access, slots, some_pages(access, 2))
    assert read(access, slots) == some_pages(access, 2)
    assert [b"".join(page) for page in pool.page_buffers(slots)] == some_pages(access, 2)


def lender(geometry, page):
    return SimpleNamespace(geometry=geometry, page_buffers=lambda slots: list(map(page, slots)))


def test_unusable_views_are_refused():
    short = memoryview(bytearray(31))
    read_only, longer, holes, wide, flat = (
        memoryview(bytes(8)),
        memoryview(bytearray(9)),
        memoryview(bytearray(16))[::2],
        memoryview(bytearray(32)).cast("i"),
        memoryview(bytearray(8)).cast("B", (2, 4)),
    )
    for page in [
        *[lambda slot, view=view: [view] for view in (read_only, longer, holes, wide, flat)],
        # The last page is looked at, too.
        lambda slot: [short[slot * 8 : slot * 8 + 8]],
    ]:
        with pytest.raises(
            InvalidPoolError, match=r"\.page_buffers must give writable, contiguous byte views"
        ):
            page_access(lender(PageGeometry("page_first", "uint8", 1, 4, (8,)), page))


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (PageGeometry("page_first", "uint8", 4, 6, (8,)), "of page_size, got 6 and 4"),
        (PageGeometry("page_first", "uint8", 0, 0, (8,)), "multiple of page_size"),
        (PageGeometry("page_first", "uint8", 1, 4, ()), "at least 1 byte each"),
        (PageGeometry("page_first", "uint8", 1, 4, (8, 0)), "at least 1 byte each"),
        ("page_first", "geometry must be a PageGeometry"),
    ],
)
def test_impossible_geometries_are_refused(geometry, message):
    with pytest.raises(InvalidPoolError, match=message):
        page_access(lender(geometry, lambda slot: []))


# Pools that tell addresses
# ---------------------------------------------------------------------------------------------


def test_memory_at_addresses_is_lent():
    pool = AddressPool()
    access = page_access(pool)
    assert isinstance(access, AddressedPages)
    assert access.geometry == PageGeometry("page_first", "bfloat16", P, PAGES * P, (40, 20))
    slots, pages = [8, 20, 0], some_pages(access, 3)
    pool.operations.clear()
    write(access, slots, pages)
    assert len(pool.operations) == 1, "one question for a batch"
    assert read(access, slots) == pages
    assert access.targets([]) == []
    assert bytes(pool.k_buffer[8:12].flatten().tolist()) == pages[0][:40]
    assert bytes(pool.v_buffer[20:24].flatten().tolist()) == pages[1][40:]
    assert not pool.k_buffer[4:8].any()
    assert not pool.k_buffer[12:20].any()
    one = page_access(changed(AddressPool(), size=P))
    write(one, [0], some_pages(one, 1))
    assert read(one, [0]) == some_pages(one, 1)


@pytest.mark.parametrize("place", [0, 2], ids=["lower", "higher"])
def test_memory_that_has_moved_is_found(place):
    pool = AddressPool()
    arena = torch.zeros(3, pool.size * WIDTH * 2, dtype=torch.uint8)

    def lie_in(row):
        k, v = row.split(pool.size * WIDTH)
        pool.k_buffer, pool.v_buffer = k.view(-1, WIDTH), v[: len(v) // 2].view(-1, WIDTH // 2)

    lie_in(arena[1])
    access = page_access(pool)
    arena[place] = 9
    lie_in(arena[place])
    assert read(access, [4, 20]) == [b"\x09" * 60] * 2


def test_a_page_spread_over_ranks_counts_its_logical_slots():
    pool = AddressPool()
    tell = pool.get_page_buffer_meta

    def tell_logical(indices):
        first = indices[:: 2 * P] // 2
        return tell((first.unsqueeze(1) + torch.arange(P)).view(-1))

    changed(pool, logical_page_size=2 * P, logical_size=2 * pool.size)
    access = page_access(changed(pool, get_page_buffer_meta=tell_logical))
    assert (access.geometry.page_size, access.geometry.size) == (2 * P, 2 * PAGES * P)
    write(access, [2 * P], some_pages(access, 1))
    assert bytes(pool.k_buffer[P : 2 * P].flatten().tolist()) == some_pages(access, 1)[0][:40]


def test_names_of_types_and_layouts():
    class Layout(str, Enum):  # noqa: UP042 - SGLang's members print as their class
        PAGE_FIRST = "page_first"

    pool = changed(AddressPool(), layout=Layout.PAGE_FIRST, dtype="float16")
    found = page_access(pool).geometry
    assert (found.layout, found.dtype) == ("page_first", "float16")
    changed(pool, storage_format_tag="token-major")
    changed(pool, temporal_dtype=torch.float32, conv_dtype=torch.bfloat16)
    found = page_access(pool).geometry
    assert (found.layout, found.dtype) == ("page_first+token-major", "float32+bfloat16")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda at, sizes: (at, [0] * len(sizes)), "at least 1 byte"),
        (lambda at, sizes: (at, [-1] * len(sizes)), "at least 1 byte"),
        (lambda at, sizes: (at, None), "at least 1 byte"),
        (lambda at, sizes: (at[:-1], sizes[:-1]), "as many addresses as lengths"),
        (lambda at, sizes: (at, sizes[:-1]), "as many addresses as lengths"),
        (lambda at, sizes: (at, [*sizes[:-1], 19]), "the same lengths for each page"),
        (lambda at, sizes: ([at[0]] * len(at), sizes), "overlapping"),
        (lambda at, sizes: at, "get_page_buffer_meta failed"),
        (lambda at, sizes: ([4096 * (1 + n) for n in range(len(at))], sizes), "not host memory"),
        (lambda at, sizes: None, "has no memory of its own"),
        (lambda at, sizes: ([], []), "has no memory of its own"),
        (lambda at, sizes: (None, None), "has no memory of its own"),
    ],
)
def test_what_contradicts_itself_or_tells_nothing_is_refused(answer, message):
    pool = AddressPool()
    tell = pool.get_page_buffer_meta
    changed(pool, get_page_buffer_meta=lambda indices: answer(*tell(indices)))
    with pytest.raises(InvalidPoolError, match=message):
        page_access(pool)


def test_a_pool_that_changes_its_mind_is_found_out():
    pool = AddressPool()
    access = page_access(pool)
    address = pool.k_buffer.data_ptr()
    for answer in ([address], [999]), ([address] * 2, [40, 19]), None:
        pool.get_page_buffer_meta = lambda indices, answer=answer: answer
        with pytest.raises(InvalidPoolError, match="when it was registered"):
            access.targets([0])


@pytest.mark.parametrize("device", ["cuda:0", torch.device("cuda")])
def test_memory_said_to_be_a_devices_is_refused(device):
    with pytest.raises(InvalidPoolError, match=r"not host memory, and it lacks .*\(get_data_page,"):
        page_access(changed(AddressPool(), device=device))


# Pools that copy
# ---------------------------------------------------------------------------------------------


def test_only_delivered_pages_reach_the_pool():
    pool = FlatPool()
    access = page_access(pool)
    assert isinstance(access, StagedPages)
    length = 2 * P * WIDTH * 4
    assert access.geometry == PageGeometry("layer_first", "float32", P, PAGES * P, (length,))
    pages = some_pages(access, 3)
    write(access, [4, 12, 20], pages, [True, False, True])
    assert read(access, [4, 12, 20]) == [pages[0], bytes(length), pages[2]]
    assert pool.get_data_page(4).view(torch.uint8).tolist() == list(pages[0])
    assert not pool.kv_buffer[:, :4].any()
    sources = access.sources([0, 4])
    pool.kv_buffer.fill_(1)
    assert [bytes(buffer) for (buffer,) in sources] == [bytes(length), pages[0]], "they are copies"


def not_contiguous(pool):
    pool.get_data_page = lambda index, flat=True: pool.kv_buffer[:, index : index + P]
    return pool


def without_page_0(pool):
    give = pool.get_data_page

    def allocated_only(index, flat=True):
        assert index, "page 0 is not allocated"
        return give(index, flat)

    pool.get_data_page = allocated_only
    return pool


@pytest.mark.parametrize(
    "pool",
    [
        WithoutAddresses(ValueError("layer_first")),
        WithoutAddresses(NotImplementedError()),
        WithoutAddresses(AssertionError()),
        not_contiguous(FlatPool()),
        without_page_0(FlatPool()),
    ],
)
def test_pools_are_copied_where_nothing_else_is_possible(pool):
    access = page_access(pool)
    assert isinstance(access, StagedPages)
    write(access, [8], some_pages(access, 1))
    assert read(access, [8]) == some_pages(access, 1)


def test_device_memory_is_copied():
    pool = changed(FlatPool(), get_page_buffer_meta=AddressPool().get_page_buffer_meta)
    assert isinstance(page_access(pool), AddressedPages)
    pool.get_data_page = FlatPool().get_data_page
    pool.kv_buffer = pool.kv_buffer.to("meta")
    assert isinstance(page_access(pool), StagedPages)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_pool_on_a_device():
    pool = WithoutAddresses(ValueError())
    pool.kv_buffer = pool.kv_buffer.cuda()
    pool.get_dummy_flat_data_page = lambda: torch.zeros(2 * P * WIDTH, device="cuda")
    access = page_access(pool)
    write(access, [4, 8], some_pages(access, 2), [True, False])
    assert read(access, [4]) == some_pages(access, 1)
    assert not pool.kv_buffer[:, 8:12].any()


def test_buffers_are_used_again_once_they_are_safe(monkeypatch):
    """Those of a page that was not delivered never: a read into them may still be going on."""
    for spare_bytes, delivered, reused in (
        (StagedPages.SPARE_BYTES, [True, False, True], [True, False, True]),
        (1, [True] * 3, [False, False, True]),
    ):
        monkeypatch.setattr(StagedPages, "SPARE_BYTES", spare_bytes)
        access, slots = page_access(FlatPool()), [0, 4, 8]
        targets = access.targets(slots)
        for number, (buffer,) in enumerate(targets):
            buffer[:] = bytes([number]) * len(buffer)
        assert [buffer[0] for (buffer,) in targets] == [0, 1, 2], "each has its own"
        access.deliver(list(compress(slots, delivered)), list(compress(targets, delivered)))
        for (buffer,) in access.targets(slots):
            buffer[:] = b"\x05" * len(buffer)
        assert [buffer[0] == 5 for (buffer,) in targets] == reused


# Refused
# ---------------------------------------------------------------------------------------------


def raising(error):
    def call(*_arguments):
        raise error

    return call


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (changed(FlatPool(), kv_buffer=None), r"FlatPool has no memory of its own \(kv_buffer is"),
        (
            changed(Attributes(), get_data_page=None),
            "cannot be served.*lacks get_dummy_flat_data_page, set_from_flat_data_page$",
        ),
        (None, "lacks get_data_page, get_dummy_flat_data_page, set_from_flat_data_page"),
        (
            changed(FlatPool(), get_dummy_flat_data_page=lambda: torch.zeros(3)),
            "get_data_page gives 320 bytes where get_dummy_flat_data_page gives 12",
        ),
        (
            changed(FlatPool(), get_dummy_flat_data_page=raising(NotImplementedError("no pages"))),
            "FlatPool can neither lend its pages nor copy them.*no pages",
        ),
        *[
            (changed(pool(), **{name: value}), message)
            for pool in (AddressPool, FlatPool)
            for name, value, message in [
                ("layout", "", "layout must be a text"),
                ("layout", 3, "layout must be a text"),
                ("dtype", None, "dtype must be a torch.dtype or its name"),
                ("dtype", object(), "dtype must be a torch.dtype or its name"),
                ("page_size", "4", "must be integers"),
                ("size", 4.5, "must be integers"),
                ("size", 25, "must be a positive multiple of page_size, got 25 and 4"),
                ("size", 2, "must be a positive multiple of page_size"),
                ("page_size", -4, "must be a positive multiple of page_size"),
            ]
        ],
    ],
)
def test_pools_that_cannot_be_served_are_refused(pool, message):
    with pytest.raises(InvalidPoolError, match=message):
        page_access(pool)


@pytest.mark.parametrize("name", ["layout", "dtype", "page_size", "size"])
def test_missing_attributes_are_named(name):
    others = {"layout", "dtype", "page_size", "size"} - {name}
    bare = SimpleNamespace(
        get_page_buffer_meta=None, **{other: getattr(Attributes, other) for other in others}
    )
    with pytest.raises(InvalidPoolError, match=f"lacks the attributes {name}$"):
        page_access(bare)
