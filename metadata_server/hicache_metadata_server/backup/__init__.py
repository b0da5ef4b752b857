"""Snapshots: the content of any store as a stream that any store can produce and load."""
