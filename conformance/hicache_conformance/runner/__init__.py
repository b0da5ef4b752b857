"""A conformance run: the child process, the pytest session in it, and the repetition of a
failure."""
