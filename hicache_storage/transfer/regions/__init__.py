"""Regions of memory that copies move: rows, runs of rows, contiguous pieces, rectangles of
bytes."""
