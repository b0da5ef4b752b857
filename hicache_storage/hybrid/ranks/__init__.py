"""Decisions that all ranks of a replica take together."""
