"""Observability: metrics, traces, request ids and logs. The core needs none of their libraries."""
