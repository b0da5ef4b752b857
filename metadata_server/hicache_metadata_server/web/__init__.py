"""HTTP: bodies, tokens, routes, metrics, pages."""
