"""Grounds: what a driver stands on, where faults can be put under it.

A ground gives the driver its files, its ports or its calls, and lets them go wrong:

| ground | a driver has it if | faults |
|---|---|---|
| `disk` | an option contains `{tmp}` | of a FUSE file system that `{tmp}` is put on |
| `network` | an option contains `{port:NAME}` | of a TCP proxy in front of each server |
| `services` | the suite starts its servers | the servers are stopped, killed, restarted, set back to a snapshot |
| `objects` | it is an `ObjectStorage` | around its own `objects_exist`, `read_objects`, `write_objects`, `delete_objects` and `clear_namespaces` |
"""
