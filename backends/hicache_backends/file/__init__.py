"""The file driver: bundles of pages in a directory that many processes share."""
