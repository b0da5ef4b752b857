"""Histories: the calls that threads and processes make, and a checker for their answers."""
