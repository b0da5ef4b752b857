"""The command `hicache`."""
