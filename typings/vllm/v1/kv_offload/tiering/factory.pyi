from typing import Any

from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

class SecondaryTierFactory:
    @classmethod
    def create_secondary_tier(
        cls, tier_config: dict[str, Any], primary_kv_view: memoryview, offloading_spec: object
    ) -> SecondaryTierManager: ...
