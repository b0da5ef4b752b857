"""What a scope knows about its slots: pure, without I/O or a clock of its own; the time is passed in, in seconds."""
