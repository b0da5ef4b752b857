"""HTTP interface: routes, request handlers, metrics, slow log, time series."""
