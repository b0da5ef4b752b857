# What the bridge uses of SGLang 0.5.23, so that it type-checks without it.
class StorageMetrics:
    prefetch_pgs: list[int]
    backup_pgs: list[int]
    prefetch_bandwidth: list[float]
    backup_bandwidth: list[float]
    def __init__(self) -> None: ...
