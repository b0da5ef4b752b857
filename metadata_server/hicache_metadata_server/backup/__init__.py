"""Snapshots: streams that hold the content of a store, and that every kind of store writes and
loads."""
