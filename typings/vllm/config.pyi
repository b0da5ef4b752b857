class ModelConfig:
    def compute_hash(self) -> str: ...

class AttentionConfig:
    backend: object

class VllmConfig:
    model_config: ModelConfig
    attention_config: AttentionConfig

def get_current_vllm_config_or_none() -> VllmConfig | None: ...
