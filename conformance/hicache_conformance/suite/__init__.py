"""`DriverConformance`, and what `hicache conformance run` collects: the cases for one driver, and
its `pytest.ini`."""
