from dataclasses import dataclass

import torch

@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""
    @staticmethod
    def ComputeKVRank(
        world_size: int, global_rank: int, local_world_size: int, local_rank: int
    ) -> int: ...
    def to_encoded_object_key(self) -> EncodedObjectKey: ...

@dataclass(frozen=True)
class EncodedObjectKey:
    chunk_hash_hex: str
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""

@dataclass(frozen=True)
class KeyEntry:
    key: EncodedObjectKey
    size_bytes: int

@dataclass(frozen=True)
class KeyListPage:
    entries: tuple[KeyEntry, ...]
    next_page_token: str | None

@dataclass(frozen=True)
class MemoryLayoutDesc:
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
