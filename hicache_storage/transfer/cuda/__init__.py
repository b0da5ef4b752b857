"""Streams and copies of a CUDA device."""
