# What the bridge uses of SGLang 0.5.23, so that it type-checks without it.
class ModelSettings:
    kv_cache_dtype: str

def get_model() -> ModelSettings: ...
