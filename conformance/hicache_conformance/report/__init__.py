"""Reports of a run: what it was about, files, and the terminal's side."""
