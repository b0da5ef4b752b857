"""Several servers on one Redis or Valkey: each operation on a scope is one Lua script there, and no server has state of its own."""
