"""Observability: metrics, request ids and logs. The core needs none of their libraries."""
