"""The cases, for the driver that the command line names."""

from hicache_conformance import DriverConformance
from hicache_conformance.model.settings import Settings
from hicache_conformance.suite.foreign_conformance import ForeignConformance

_run = Settings.of_environment()

TestDriver = type(
    "TestDriver",
    (ForeignConformance if _run and _run.interface else DriverConformance,),
    {
        "driver": _run.driver if _run else "",
        "config": _run.config if _run else {},
        "services": _run.services if _run else None,
        "__module__": __name__,
    },
)
