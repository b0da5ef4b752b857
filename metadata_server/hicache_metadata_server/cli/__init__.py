"""`hicache metadata`, one module for each group of commands."""
