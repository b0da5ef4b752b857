"""Input and output that several drivers share: threads, vectored reads, statx, descriptors."""
