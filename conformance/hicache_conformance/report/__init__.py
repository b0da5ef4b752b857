"""Reports of a run: what it was about, and files."""
