import torch

class ObjectKey:
    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str

class MemoryLayoutDesc:
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
