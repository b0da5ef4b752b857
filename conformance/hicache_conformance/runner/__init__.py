"""A conformance run: the child process, its pytest session, and the replay of failures."""
