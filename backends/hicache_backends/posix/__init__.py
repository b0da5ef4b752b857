"""Input and output that several drivers share: open files, directories, buffers."""
