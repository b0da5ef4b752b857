"""Numbers of pages from slots."""

from __future__ import annotations

import pytest
import torch

from hicache_storage.pools.pages import check_pages, page_numbers
from hicache_storage.spec import InvalidTransferError


def test_pages_are_whole_and_in_order():
    two = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3]), torch.arange(8).view(2, 4)
    assert page_numbers(two, 4).tolist() == [[2, 0], [0, 1]]
    assert page_numbers([torch.tensor([[4, 5], [2, 3]])], 2).tolist() == [[2, 1]]
    assert page_numbers([torch.tensor([7, 3, 7])], 1).tolist() == [[7, 3, 7]]
    # Not next to each other in memory; and pages of another number than a power of two.
    assert page_numbers([torch.tensor([6, 0, 7, 0, 8, 0])[::2]], 3).tolist() == [[2]]
    assert page_numbers([torch.arange(6, 15)], 3).tolist() == [[2, 3, 4]]
    many = torch.randperm(5000).unsqueeze(1) * 16 + torch.arange(16)
    assert page_numbers([many.view(-1)] * 2, 16)[1].tolist() == (many[:, 0] // 16).tolist()
    wrong = many.clone()
    wrong[4321, 7] += 1
    with pytest.raises(InvalidTransferError, match="whole pages of 16"):
        check_pages(wrong.view(-1), 16)


@pytest.mark.parametrize(
    "wrong", [[0, 1, 2], [1, 2, 3, 4], [0, 1, 3, 2], [0, 1, 2, 4], [0, 1, 2, 3, 8, 9, 10, 10]]
)
def test_what_is_no_page_is_refused(wrong):
    with pytest.raises(InvalidTransferError, match=r"whole pages of 4 consecutive slots, not"):
        page_numbers([torch.tensor(wrong)], 4)
    with pytest.raises(InvalidTransferError, match=r"int64, got torch\.int32"):
        page_numbers([torch.tensor([0], dtype=torch.int32)], 1)
