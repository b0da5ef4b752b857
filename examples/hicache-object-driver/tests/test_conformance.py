from hicache_conformance import DriverConformance


class TestObject(DriverConformance):
    driver = "object"
