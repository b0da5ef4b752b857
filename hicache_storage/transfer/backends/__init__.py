"""I/O backends: implementations of the copies of a transfer."""
