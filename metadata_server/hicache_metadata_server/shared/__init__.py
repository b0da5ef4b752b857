"""Several servers on one Redis or Valkey: what is done to a scope is done there, by Lua scripts; no
server keeps what another would miss."""
