"""Parts of copies: runs of pages, rectangles of bytes, rows by their numbers."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage.spec import InvalidTransferError
from hicache_storage.transfer import StreamFailedError
from hicache_storage.transfer.cuda import runtime as cuda_runtime
from hicache_storage.transfer.pages import first_slots, page_numbers
from hicache_storage.transfer.regions.pieces import pieces_of
from hicache_storage.transfer.regions.rectangles import MAX_PITCH, rectangles
from hicache_storage.transfer.regions.rows import gather_rows, rows_of, scatter_rows
from hicache_storage.transfer.regions.runs import RowRuns, named_pages

DTYPES = (torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.float64)


def tensor(numbers):
    return torch.tensor(numbers, dtype=torch.int64)


# Runs
# -----------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 30)),
        min_size=1,
        unique_by=lambda pair: pair[1],
    )
)
def test_runs_are_the_pairs_and_as_long_as_can_be(pairs):
    rows = RowRuns(
        tensor([source for source, _ in pairs]), tensor([destination for _, destination in pairs])
    )
    assert sorted(zip(rows.sources.tolist(), rows.destinations.tolist(), strict=True)) == sorted(
        pairs
    )
    runs = list(rows.runs())
    assert len(runs) == rows.run_num
    assert sorted(
        (run.source + step, run.destination + step) for run in runs for step in range(run.rows)
    ) == sorted(pairs)
    starts = {(run.source, run.destination) for run in runs}
    assert not starts & {(run.source + run.rows, run.destination + run.rows) for run in runs}
    assert [run.destination for run in runs] == sorted(run.destination for run in runs)


@pytest.mark.parametrize("pages", [[3], [1, 2, 3], [9, 0, 4]])
def test_runs_do_not_depend_on_the_order_of_the_pairs(pages):
    there, back = tensor(pages), tensor(pages[::-1])
    assert list(RowRuns(there, there).runs()) == list(RowRuns(back, back).runs())


def test_a_source_may_go_to_several_places():
    assert [tuple(run) for run in RowRuns(tensor([5, 5, 6]), tensor([0, 1, 2])).runs()] == [
        (5, 0, 1),
        (5, 1, 2),
    ]


def test_pages_by_name():
    assert named_pages("host", tensor([3])) == "host page 3"
    assert named_pages("host", tensor([3, 9])) == "2 host pages"


# Page numbers
# ---------------------------------------------------------------------------------------------------------


def test_page_numbers():
    assert page_numbers(tensor([8, 9, 10, 11, 0, 1, 2, 3]), 4).tolist() == [2, 0]
    assert first_slots(tensor([8, 9, 10, 11, 0, 1, 2, 3]), 4) == [8, 0]
    assert page_numbers(tensor([4, 2]), 1).tolist() == [4, 2]


@pytest.mark.parametrize(
    "slots", [[0, 1, 2], [1, 2, 3, 4], [0, 1, 3, 2], [0, 1, 2, 3, 5, 6, 7, 8], [0, 0, 0, 0]]
)
def test_what_is_not_whole_pages_is_refused(slots):
    with pytest.raises(InvalidTransferError, match="whole pages of 4 consecutive slots"):
        page_numbers(tensor(slots), 4)


def test_slots_are_integers():
    for slots in (
        torch.tensor([0.0, 1.0]),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([False, True]),
    ):
        with pytest.raises(InvalidTransferError, match=f"must be int64, got {slots.dtype}"):
            page_numbers(slots, 2)


# Rectangles
# -----------------------------------------------------------------------------------------------------------


@st.composite
def views(draw):
    """Two views of one shape into memories of their own, each with gaps and axes in any order."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    dtype = draw(st.sampled_from(DTYPES))
    return [_view(draw, shape, dtype) for _ in range(2)]


def _view(draw, shape, dtype):
    axes = range(len(shape))
    order = draw(st.permutations(axes))
    room = [shape[axis] + draw(st.integers(0, 2)) for axis in order]
    size = dtype.itemsize * torch.Size(room).numel()
    buffer = torch.randint(256, (size,), dtype=torch.uint8).view(dtype).view(room)
    for axis, number in enumerate(order):
        buffer = buffer.narrow(
            axis, draw(st.integers(0, room[axis] - shape[number])), shape[number]
        )
    return buffer.permute([order.index(axis) for axis in axes])


def raw(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


@settings(deadline=None)
@given(views())
def test_rectangles_are_the_copy(pair):
    destination, source = pair
    storage = destination.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    before = whole.clone()
    expected = destination.clone()
    expected.copy_(source)
    for rectangle in rectangles(destination, source):
        assert (
            rectangle.height == 1
            or rectangle.destination_pitch >= rectangle.width <= rectangle.source_pitch
        )
        for row in range(rectangle.height):
            to = rectangle.destination + row * rectangle.destination_pitch
            ctypes.memmove(to, rectangle.source + row * rectangle.source_pitch, rectangle.width)
    assert torch.equal(raw(destination), raw(expected))
    written = torch.zeros_like(destination.view(_integer(destination)), dtype=torch.bool)
    outside = torch.ones(whole.numel() // destination.element_size(), dtype=torch.bool)
    outside.as_strided(destination.shape, destination.stride(), destination.storage_offset()).copy_(
        written
    )
    assert torch.equal(
        whole.view(-1, destination.element_size())[outside],
        before.view(-1, destination.element_size())[outside],
    )


@settings(deadline=None)
@given(views(), st.data())
def test_pieces_are_the_rows(pair, data):
    """Rows with any gaps between any tensors, carried out by the host piece by piece."""
    destination, source = pair
    count = len(destination)
    sources = tensor(data.draw(st.lists(st.integers(0, count - 1), min_size=count, max_size=count)))
    destinations = tensor(data.draw(st.permutations(range(count))))
    pieces = pieces_of(destination, source, rows := RowRuns(sources, destinations))
    assert pieces_of(destination, source, rows) is pieces
    expected = destination.clone().view(_integer(destination))
    expected[destinations] = source.view(_integer(source))[sources]
    for to, origin, size in zip(*(numbers.tolist() for numbers in pieces), strict=True):
        ctypes.memmove(destination.data_ptr() + to, source.data_ptr() + origin, size)
    assert torch.equal(raw(destination), raw(expected))


def test_adjacent_rows_are_one_piece_where_nothing_lies_between():
    memory, pages = torch.zeros(9, 4, 8, dtype=torch.int16), tensor([5, 6, 7, 2])
    rows = RowRuns(pages, pages)
    assert pieces_of(memory, memory.clone(), rows).sizes.tolist() == [64, 192]
    assert pieces_of(memory[:, :2], memory.clone()[:, :2], rows).sizes.tolist() == [32] * 4
    assert pieces_of(memory[:, :, :4], memory.clone()[:, :, :4], rows).sizes.tolist() == [8] * 16


def _integer(tensor):
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]


def test_one_rectangle_where_rows_lie_in_one_grid():
    memory = torch.zeros(10, 4, 3, 8, dtype=torch.int16)
    page_first, dense = memory[2:6, :, 1], torch.zeros(4, 4, 8, dtype=torch.int16)
    (rectangle,) = rectangles(dense, page_first)
    assert (rectangle.width, rectangle.height) == (16, 16)
    assert (rectangle.destination_pitch, rectangle.source_pitch) == (16, 48)
    (rectangle,) = rectangles(dense, memory[0, :, :, :1].new_zeros(4, 4, 8))
    assert (rectangle.width, rectangle.height) == (256, 1)


def test_rows_that_lie_too_far_apart_are_copied_alone():
    memory = torch.empty(0, dtype=torch.uint8, device="meta")
    for pitch, heights in ((MAX_PITCH, [2]), (MAX_PITCH + 1, [1, 1])):
        far, near = memory.as_strided((2, 4), (pitch, 1)), memory.as_strided((2, 4), (5, 1))
        assert [
            rectangle.height for rectangle in rectangles(_Addressed(far), _Addressed(near))
        ] == heights


def test_copies_with_gaps_are_rectangles_for_cuda(monkeypatch):
    """Without a GPU: what CUDA is called with, carried out by the host."""
    calls = []

    def memcpy_2d(to, to_pitch, origin, origin_pitch, width, height, kind, stream):
        calls.append((kind, stream))
        for row in range(height):
            ctypes.memmove(to + row * to_pitch, origin + row * origin_pitch, width)
        return 0

    monkeypatch.setattr(cuda_runtime, "_memcpy_2d", lambda: memcpy_2d)
    memory = torch.randint(-99, 99, (6, 4, 3, 8), dtype=torch.int16)
    host, device = memory.permute(2, 0, 1, 3)[1][2:5], torch.zeros(3, 4, 8, dtype=torch.int16)
    cuda_runtime.copy_with_gaps(device, host, SimpleNamespace(cuda_stream=7))
    assert torch.equal(device, host)
    assert calls == [(4, 7)]
    forgotten = []
    monkeypatch.setattr(cuda_runtime, "forget_error", lambda: forgotten.append(True))
    monkeypatch.setattr(cuda_runtime, "_memcpy_2d", lambda: lambda *arguments: 1)
    with pytest.raises(StreamFailedError, match="12 rows of 16 bytes failed with CUDA error 1"):
        cuda_runtime.copy_with_gaps(device, host, SimpleNamespace(cuda_stream=7))
    assert forgotten


class _Addressed:
    """A tensor without memory, at address 0."""

    def __init__(self, tensor):
        self.shape, self.stride, self.element_size = (
            tensor.shape,
            tensor.stride,
            tensor.element_size,
        )

    def data_ptr(self):
        return 0


# Rows
# -----------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(views(), st.data())
def test_rows_go_where_their_numbers_say(pair, data):
    one, other = pair
    count = len(one)
    rows = tensor(data.draw(st.lists(st.integers(0, count - 1), min_size=count, max_size=count)))
    expected = (
        other[rows].clone() if other.element_size() > 1 else raw(other).view(other.shape)[rows]
    )
    gather_rows(one, other, rows)
    assert torch.equal(raw(one), raw(expected))
    order = tensor(data.draw(st.permutations(range(count))))
    expected = raw(one).view(count, -1).clone()
    scatter_rows(other, order, one)
    assert torch.equal(raw(other).view(count, -1)[order], expected)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1))
def test_rows_of_numbers_adjacent_ones_joined(numbers):
    found = list(rows_of(torch.arange(10), tensor(numbers)))
    assert torch.cat(found).tolist() == sorted(set(numbers))
    assert all(int(earlier[-1]) + 1 < int(later[0]) for earlier, later in pairwise(found))
