"""`DriverConformance`, and the modules that the commands collect, with their `pytest.ini`."""
