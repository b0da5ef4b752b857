"""Several servers on one Redis or Valkey: each owns some scopes, and serves them from memory.

Redis has the log and the snapshot of each scope, and who owns it.
docs/design/metadata-scopes.md has the keys, and why two servers never serve one scope.
"""
