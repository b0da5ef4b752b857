"""The metadata server of the 3FS driver, its protocol, and the state machine that works without a
server too."""
