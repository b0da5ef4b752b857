"""Tools for authors and operators: scaffold, diagnosis, benchmark, dashboards. Without terminal
output."""
