"""The cases, for the driver that the command line names."""

from hicache_conformance.model.settings import Settings
from hicache_conformance.suite.driver_conformance import DriverConformance

_run = Settings.of_environment() or Settings()


class TestDriver(DriverConformance):
    """The driver of this run."""

    driver = _run.driver
    config = _run.config
    services = _run.services
