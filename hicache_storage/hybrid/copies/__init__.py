"""Copies of all pools between the device and the host."""
