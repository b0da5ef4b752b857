"""Drivers with LMCache's interface of L2 adapters."""
