"""The metadata protocol's cases, for the server that the command line names."""

from hicache_conformance.model.settings import RunFile
from hicache_conformance.protocol.suite import MetadataConformance, cases_of_parts, protocol_cases

_run = RunFile.of_environment()
_server = _run.server if _run else None
_left_out = protocol_cases().keys() - cases_of_parts(_server.parts if _server else ()).keys()

TestServer = type(
    "TestServer",
    (MetadataConformance,),
    {
        # A name that is bound to None hides the case of a base class from pytest.
        **dict.fromkeys(_left_out),
        "driver": _server.url or _server.start_server if _server else "",
        "__module__": __name__,
    },
)
