"""The three-tier cache of hybrid models above a storage: pools as one, copies, prefetch and backup, agreed by all ranks."""
