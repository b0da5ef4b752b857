"""The 3FS driver: pages in slots of large files, and a map of them in the metadata server."""
