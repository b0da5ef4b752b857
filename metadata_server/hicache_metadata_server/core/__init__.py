"""The state machine of the server: scopes and their slots. No I/O; the time is an argument."""
