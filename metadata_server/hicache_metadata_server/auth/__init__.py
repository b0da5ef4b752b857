"""Access control: tokens, quotas, rate limits, allowed origins, the audit log."""
