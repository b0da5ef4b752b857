"""Simulation of a cluster's requests to the metadata server.

Events are played to the real state machine in simulated time, so that eviction, leases and
quarantines behave as in a server.
"""
