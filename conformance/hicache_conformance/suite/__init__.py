"""What `hicache conformance run` collects: the cases for one driver, and the settings of the pytest that runs them."""
