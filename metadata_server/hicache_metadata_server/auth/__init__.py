"""Access control: tokens, quotas, allowed origins, the audit log."""
