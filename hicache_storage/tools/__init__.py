"""Tools for authors and operators, without terminal output.

Scaffold, diagnosis, benchmark, dashboards.
"""
