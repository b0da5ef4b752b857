"""The metadata server of the 3FS driver, and its protocol."""
