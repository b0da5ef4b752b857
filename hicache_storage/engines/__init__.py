"""Bridges: how a driver runs inside a real engine."""
