"""HTTP: routes and bodies, tokens, quotas and TLS, the audit log, metrics, the server's past, pages."""
