"""Several servers on one Redis or Valkey: each owns some scopes, and serves them from memory.

Redis has the log and the snapshot of each scope, and who owns it.
docs/design/metadata-scopes.md has the keys, and why two servers never serve one scope.

Raises:
    StoreError: the client library, an extra, is not installed.
"""

from importlib.util import find_spec

from hicache_metadata_server.core.errors import StoreError

if find_spec("redis") is None:
    raise StoreError("a shared store needs one more package: pip install 'hicache-storage[redis]'")
