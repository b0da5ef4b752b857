"""Throughput and latency of drivers, every answer checked: what `hicache bench` measures.

A *client* is one caller, as an engine has several. Each round of a client writes some batches of
fresh pages, looks them up, reads them back, and removes them again; the calls of write, lookup and
read are timed, preparation and verification are not.
"""
