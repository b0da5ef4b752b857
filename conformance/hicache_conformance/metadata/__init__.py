"""Black-box judge of servers that speak the metadata protocol (`docs/metadata-protocol.md`)."""
