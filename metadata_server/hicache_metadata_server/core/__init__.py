"""The state machine of the server: scopes and their slots, without I/O and without a clock of its
own."""
