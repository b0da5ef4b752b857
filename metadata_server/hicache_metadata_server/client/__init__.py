"""Clients of the metadata protocol, which import no server code."""
