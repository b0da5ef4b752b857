"""Storages of the driver under test in processes of their own."""
