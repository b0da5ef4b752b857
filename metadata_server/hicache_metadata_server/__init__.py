"""The metadata server of the 3FS driver; so far the protocol that it, its clients and its judge share."""
