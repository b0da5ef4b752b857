"""Commands of `hicache metadata` that are more than a request to a server."""
