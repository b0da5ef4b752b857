"""Checked access to the storage under test, page patterns, host pools and measurements, for the
cases."""
