"""Commands of `hicache metadata`, each with the modules that only it needs."""
