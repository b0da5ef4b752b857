# What the bridge uses of SGLang 0.5.23, so that it type-checks without it.
class ModelSettings:
    kv_cache_dtype: str

class ParallelContext:
    dp_rank: int | None

class ServingSettings:
    weight_version: str

def get_model() -> ModelSettings: ...
def get_parallel() -> ParallelContext: ...
def get_serving() -> ServingSettings: ...
