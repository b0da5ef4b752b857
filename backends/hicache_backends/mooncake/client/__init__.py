"""Access to Mooncake's native client."""
