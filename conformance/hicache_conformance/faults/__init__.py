"""What goes wrong below a driver: planned from a seed, written down, replayed, and made as small as possible."""
