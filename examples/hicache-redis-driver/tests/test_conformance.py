from hicache_conformance import DriverConformance


class TestRedis(DriverConformance):
    driver = "redis"
