"""The row kernel: its arithmetic on the CPU against torch's indexing, and NVRTC for every
architecture."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage.pools import PagedHostPool
from hicache_storage.spec import ConfigError, InvalidPoolError
from hicache_storage.transfer.cuda.kernel import compiled, make_move
from hicache_storage.transfer.plan import geometry
from hicache_storage.transfer.streams import RowSide
from tests.support.pool_strategies import pool_pairs
from tests.support.pools import make_pool
from tests.transfer.rig import POISON, fill, library, random_bytes, raw


@settings(deadline=None, max_examples=60)
@given(pool_pairs(), st.data())
def test_pages_go_where_their_numbers_say(pair, data):
    device, host = pair
    pages = host.page_num
    numbers = st.permutations(range(pages))
    count = data.draw(st.integers(1, pages))
    to, origin = (torch.tensor(data.draw(numbers)[:count]) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for part in range(len(device.layer(0))):
        views = [[pool.layer(layer)[part] for layer in range(host.layer_num)] for pool in pair]
        if data.draw(st.booleans()):
            views.reverse()
        for view in views[1]:
            view.copy_(random_bytes(view, generator))
        for view in views[0]:
            fill(view, POISON)
        expected = [view.clone() for view in views[0]]
        for old, new in zip(expected, views[1], strict=True):
            old.view(torch.uint8)[to] = new.view(torch.uint8)[origin]
        run(views, [to, origin], data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 32])))
        assert all(torch.equal(raw(a), raw(b)) for a, b in zip(views[0], expected, strict=True))


def run(views, numbers, blocks, threads):
    """Launch the kernel on the CPU, for all parts of two sides; numbers of None are 0, 1, 2, ..."""
    addresses = [[view.data_ptr() for view in side] for side in views]
    move, word = make_move(tuple(RowSide(side, 0) for side in views), addresses)
    tables = [torch.tensor(starts) for starts in addresses]
    for side, table, pages in zip((move.to, move.origin), tables, numbers, strict=True):
        side.parts = table.data_ptr()
        side.pages = 0 if pages is None else pages.data_ptr()
    move.parts, move.pages = len(views[0]), len(numbers[1])
    library().run(word, blocks, threads, ctypes.addressof(move))


def test_pages_without_numbers_come_in_order():
    staged, pool = torch.zeros(3, 2, 8), torch.rand(5, 2, 8)
    run([[staged], [pool]], [None, torch.tensor([4, 0, 2])], 2, 32)
    assert torch.equal(staged, pool[[4, 0, 2]])


@pytest.mark.parametrize("heads", [1, 2])
def test_the_widest_words_are_moved(heads):
    """16 bytes where lengths and addresses allow it."""
    shape = {"size": 8, "page_size": 2, "layers": range(2), "head_num": heads, "head_dim": 8}
    host = make_pool(PagedHostPool, "mha", **shape, dtype=torch.bfloat16, layout="page_head")
    device = torch.zeros(4, 2, heads, 8, dtype=torch.bfloat16)
    view, _ = host.layer(1)
    sides = RowSide([view], 0), RowSide([device], 0)
    assert make_move(sides, [[view.data_ptr()], [device.data_ptr()]])[1] == 16
    assert make_move(sides, [[view.data_ptr() + 4], [device.data_ptr()]])[1] == 4


def test_what_the_kernel_does_not_know_is_refused():
    gaps = torch.zeros(2, 3, 6, 5, 4)[:, :2, ::4, :3, :2]
    whole = torch.zeros(2, 2, 2, 3, 2)
    with pytest.raises(InvalidPoolError, match="gaps along 3 axes"):
        geometry(whole, gaps)
    one, other = torch.zeros(2, 2, 4), torch.zeros(2, 2, 8)[..., :4]
    with pytest.raises(InvalidPoolError, match="layers must have the same strides"):
        make_move((RowSide([one, one], 0), RowSide([one, other], 0)), [[0, 0], [0, 0]])
    huge = torch.empty(1, dtype=torch.uint8).expand(1 << 34, 4, 1)
    with pytest.raises(InvalidPoolError, match="less than"):
        make_move((RowSide([huge], 0), RowSide([huge], 0)), [[1], [1]])


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"])
def test_nvrtc_compiles_it(monkeypatch, tmp_path, arch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = compiled.__wrapped__(arch).code
    assert code.startswith(b"\x7fELF")
    assert all(f"rows{word}".encode() in code for word in (16, 8, 4, 2, 1))
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == code]
    assert len(kept) == 1
    assert compiled.__wrapped__(arch).code == code


def test_it_is_compiled_where_nothing_can_be_kept(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compiled.__wrapped__("sm_90").code


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(ConfigError, match=r"pip install 'hicache-storage\[cuda\]'"):
        compiled.__wrapped__("sm_90")
