"""Several servers on one Redis or Valkey.

Every operation on a scope is a Lua script, which Redis runs atomically. A server keeps no state of
its own that another server would need.
"""
