"""Drivers of another interface, judged by the same cases: an adapter that calls them as their own engine does."""
