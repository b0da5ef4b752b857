"""Status page for a browser."""
