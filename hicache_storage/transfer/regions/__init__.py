"""Regions of memory that copies move: rows, runs of rows, pieces, rectangles of bytes."""
