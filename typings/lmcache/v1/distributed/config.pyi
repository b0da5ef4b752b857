class L1MemoryManagerConfig:
    def __init__(
        self, size_in_bytes: int, use_lazy: bool, *, align_bytes: int = 4096, shm_name: str = ""
    ) -> None: ...
