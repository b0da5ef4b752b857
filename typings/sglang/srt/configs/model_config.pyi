# What the bridge uses of SGLang 0.5.23, so that it type-checks without it.
from sglang.srt.runtime_context import ServerArgs

class ModelConfig:
    @staticmethod
    def from_server_args(server_args: ServerArgs) -> ModelConfig: ...
    def get_total_num_kv_heads(self) -> int: ...
