from hicache_conformance import DriverConformance


class TestMemory(DriverConformance):
    driver = "memory"
