"""The pools of a hybrid model as one allocator on each tier."""
