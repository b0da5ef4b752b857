"""The drivers that come with hicache-storage, one package each."""
