from typing import Self

class L1MemoryDesc:
    ptr: int
    size: int
    align_bytes: int

class L2StoreResult(int):
    def __new__(cls, success: bool, bytes_transferred: int) -> Self: ...
    def is_successful(self) -> bool: ...
