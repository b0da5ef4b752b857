"""The status page for a browser."""
