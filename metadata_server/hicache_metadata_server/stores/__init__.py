"""Where a server keeps its state."""
