"""What a cluster would ask of its metadata server, played to the real state machine in simulated
time."""
