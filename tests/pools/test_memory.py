"""Host memory: aligned, seen as bytes, and gone when nobody looks at it any more."""

from __future__ import annotations

import gc
import mmap
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from hicache_storage.pools import byte_view, host_tensor
from hicache_storage.pools.memory import in_host_memory
from hicache_storage.spec import InvalidPoolError

if TYPE_CHECKING:
    from collections.abc import Callable


def mapped_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * 4096


def flags_of(address: int) -> list[str]:
    """Flags of the mapping that contains an address, as in /proc/self/smaps."""
    inside = False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            head, *rest = line.split()
            if "-" in head and not head.endswith(":"):
                start, end = (int(part, 16) for part in head.split("-"))
                inside = start <= address < end
            elif inside and head == "VmFlags:":
                return rest
    raise AssertionError("no such mapping")


class TestHostTensor:
    def test_memory_goes_with_the_last_view(self) -> None:
        before = mapped_bytes()
        tensor = host_tensor((256 << 20,), torch.uint8)
        view = byte_view(tensor[1 << 20 : 2 << 20])[10:20]
        del tensor
        view[:] = b"0123456789"
        assert mapped_bytes() - before > 200 << 20
        assert bytes(view) == b"0123456789"
        del view
        gc.collect()
        assert mapped_bytes() - before < 200 << 20

    def test_more_than_there_is_is_refused(self) -> None:
        with pytest.raises(InvalidPoolError, match="cannot map"):
            host_tensor((1 << 62,), torch.uint8)
        with pytest.raises(InvalidPoolError, match="cannot map"):
            host_tensor((1 << 40, 1 << 40), torch.uint8)


class TestPageLocking:
    """Against a stand-in for the CUDA runtime."""

    @pytest.fixture
    def runtime(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        runtime = SimpleNamespace(locked={}, error=0)

        def register(address: int, size: int, flags: int) -> int:
            if not runtime.error:
                runtime.locked[address] = size
            return runtime.error

        runtime.cudaHostRegister = register
        runtime.cudaHostUnregister = lambda address: runtime.locked.pop(address) and 0
        runtime.forgotten = []
        monkeypatch.setattr(
            "hicache_storage.pools.memory.take_error",
            lambda: runtime.forgotten.append(runtime.error),
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        return runtime

    def test_memory_is_locked_until_it_goes(self, runtime: SimpleNamespace) -> None:
        tensor = host_tensor((3, 4096), torch.float16)
        assert runtime.locked == {tensor.data_ptr(): 3 * 4096 * 2}
        view = tensor[1]
        del tensor
        assert runtime.locked
        del view
        assert runtime.locked == {}

    def test_only_if_asked_and_only_if_there_is_any(self, runtime: SimpleNamespace) -> None:
        tensors = (
            host_tensor((4096,), torch.uint8, pin_memory=False),
            host_tensor((0,), torch.uint8),
        )
        assert runtime.locked == {}
        del tensors

    def test_a_refusal_says_what_to_do(self, runtime: SimpleNamespace) -> None:
        runtime.error = 2
        with pytest.raises(InvalidPoolError, match="pass a smaller size, or pin_memory=False"):
            host_tensor((4096,), torch.uint8)
        # Or torch would raise it at the next kernel.
        assert runtime.forgotten == [2]

    def test_a_forked_child_has_no_part_in_it(self, runtime: SimpleNamespace) -> None:
        locked, other = (
            host_tensor((1 << 20,), torch.uint8),
            host_tensor((1 << 20,), torch.uint8, pin_memory=False),
        )
        assert "dc" in flags_of(locked.data_ptr())
        assert "dc" not in flags_of(other.data_ptr())
        del locked


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_sees_locked_memory() -> None:
    assert host_tensor((1 << 20,), torch.uint8).is_pinned()
    assert not host_tensor((1 << 20,), torch.uint8, pin_memory=False).is_pinned()
    assert not in_host_memory([(torch.zeros(1024, device="cuda").data_ptr(), 4096)])


class TestByteView:
    def test_is_the_tensor(self) -> None:
        tensor = torch.zeros(2, 3, dtype=torch.int16)
        view = byte_view(tensor)
        assert (len(view), view.format, view.readonly, view.ndim) == (12, "B", False, 1)
        view[2:4] = b"\x01\x02"
        assert tensor.tolist() == [[0, 0x201, 0], [0, 0, 0]]

    def test_of_nothing(self) -> None:
        assert len(byte_view(torch.empty(0, 3))) == 0

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.zeros(4, 4)[:, 1],
            lambda: torch.zeros(4, 4).t(),
            lambda: torch.zeros(4, device="meta"),
        ],
    )
    def test_without_flat_bytes_is_refused(self, make: Callable[[], torch.Tensor]) -> None:
        with pytest.raises(InvalidPoolError, match="has no flat host bytes"):
            byte_view(make())


def test_host_memory_is_told_from_other_addresses() -> None:
    tensor = host_tensor((8192,), torch.uint8)
    start = tensor.data_ptr()
    assert in_host_memory([(start, 8192), (start + 4096, 100)])
    assert not in_host_memory([(start, 8192), (0x1000, 1)])
    assert not in_host_memory([(start, 1 << 40)])


def test_memory_that_cannot_be_written_is_not_host_memory() -> None:
    reserved = mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = torch.frombuffer(reserved, dtype=torch.uint8).data_ptr()
    assert not in_host_memory([(start, 8192)])
