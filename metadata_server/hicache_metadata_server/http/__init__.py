"""The HTTP front end: routes, bodies, TLS, metrics, the time series of the status page."""
