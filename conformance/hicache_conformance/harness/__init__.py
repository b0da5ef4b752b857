"""Checked access to the storage under test, page patterns, host pools, measurements."""
