"""The cases, for the driver that the command line names."""

from hicache_conformance import DriverConformance
from hicache_conformance.settings import RunFile

_run = RunFile.of_environment()


class TestDriver(DriverConformance):
    driver = _run.driver if _run else ""
    config = _run.config if _run else {}
