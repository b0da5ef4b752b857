"""The Mooncake driver: pages in a distributed memory pool."""
