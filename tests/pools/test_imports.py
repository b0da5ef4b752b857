"""Cost of importing the package."""

from __future__ import annotations

from tests.support.commands import run_python

WITHOUT_TORCH = """
import sys
import hicache_storage.pools, hicache_storage.pools.access, hicache_storage.pools.adapter
from hicache_storage.pools import PageAccess, page_access
from hicache_storage.spec import InvalidPoolError, PageGeometry

class Lender:
    geometry = PageGeometry("page_first", "uint8", 1, 4, (8,))
    memory = memoryview(bytearray(32))
    def page_buffers(self, first_slots):
        return [[self.memory[slot * 8 : slot * 8 + 8]] for slot in first_slots]

assert len(page_access(Lender()).sources([1, 2])) == 2
try:
    page_access(object())
except InvalidPoolError:
    pass
found = {"torch", "numpy"} & sys.modules.keys()
assert not found, f"{found} was imported"
"""


def test_pools_of_the_protocol_need_no_torch() -> None:
    run_python(WITHOUT_TORCH)
