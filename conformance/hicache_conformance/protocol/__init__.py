"""Black-box suite for servers that speak the metadata protocol (`docs/metadata-protocol.md`)."""
