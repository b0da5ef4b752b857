"""Reference servers with one planted fault each, and the rules that find them out."""

from __future__ import annotations

import importlib
from pathlib import Path

from hicache_metadata_server import protocol as p
from tests.conformance.metadata.planting import FAULTS, TOKENS, Fault
from tests.conformance.metadata.reference import Refused
from tests.conformance.metadata.reference_server import Handlers, ReferenceServer

for _module in sorted(Path(__file__).parent.glob("faulty_*.py")):
    importlib.import_module(f"tests.conformance.metadata.{_module.stem}")


class SpeaksTheOldPartOnly(Handlers):
    """No fault: a server without a native part."""

    def meaning(self, path, body):
        if path.startswith("/v2"):
            raise Refused(404, "unknown_route", f"there is no {path}")
        return super().meaning(path, body)


OLD = Fault(breaks=(), handlers=SpeaksTheOldPartOnly)


def server(
    name: str = "",
    *,
    port: int = 0,
    journal: Path | None = None,
    durability: p.StoreDurability = p.StoreDurability.NONE,
    tokens: bool = False,
) -> ReferenceServer:
    """The reference server, or one of the faulty ones."""
    fault = {**FAULTS, "": Fault(breaks=()), "SpeaksTheOldPartOnly": OLD}[name]
    kind = type("Made", (fault.reference,), {"kind_of_scope": fault.scope})
    handlers = fault.handlers(kind(limits=fault.limits, durability=durability), journal)
    return ReferenceServer(handlers, port, TOKENS if tokens else fault.tokens, fault.handler)
