from typing import Any, Self

class L2AdapterConfigBase:
    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self: ...

def get_l2_adapter_config_class(type_name: str) -> type[L2AdapterConfigBase]: ...
