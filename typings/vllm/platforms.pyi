class DeviceCapability:
    def as_version_str(self) -> str: ...

class Platform:
    device_type: str
    def get_device_capability(self) -> DeviceCapability | None: ...

current_platform: Platform
