"""What several threads and processes did to a store and saw of it, and whether that can be."""
