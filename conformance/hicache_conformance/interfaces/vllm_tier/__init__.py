"""Drivers with vLLM's interface of secondary tiers."""
