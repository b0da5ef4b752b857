"""Histories: the calls that threads and processes make on a store, and a checker for their
answers."""
