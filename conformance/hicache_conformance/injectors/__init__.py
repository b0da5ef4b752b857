"""Fault injectors: places below a driver where the suite makes operations fail.

An injector provides the driver's files, its ports or its calls, and makes them fail:

| injector | a driver has it if | faults |
|---|---|---|
| `disk` | an option contains `{tmp}` | of a FUSE file system that `{tmp}` is put on |
| `network` | an option contains `{port:NAME}` | of a TCP proxy in front of each server |
| `services` | the suite starts its servers | the servers are stopped, killed, restarted, set back to a snapshot |
| `objects` | it is an `ObjectStorage` | around its `objects_exist`, `read_objects`, `write_objects`, `delete_objects` and `clear_namespaces` |
"""
