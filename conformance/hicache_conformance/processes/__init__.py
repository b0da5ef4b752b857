"""Storages of the driver under test in worker processes."""
