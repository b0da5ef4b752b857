"""The base class of `MetadataConformance`: the server under test, and the context of its cases."""

from __future__ import annotations

import platform
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

import pytest

from hicache_conformance.model.outcomes import Header
from hicache_conformance.model.profiles import PROFILES
from hicache_conformance.model.pytest_keys import CASE_MARK
from hicache_conformance.model.session_settings import settings_of
from hicache_conformance.model.violation import NotPromised, Violation
from hicache_conformance.protocol.context import ServerContext
from hicache_conformance.protocol.http_client import HttpClient
from hicache_conformance.protocol.rules import Need, protocol_version
from hicache_conformance.protocol.server import RemoteServer, Served
from hicache_conformance.protocol.server_info import CannotBeginError, look
from hicache_conformance.report.header import SUITE, installed_version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_conformance.model.outcomes import StreamWriter
    from hicache_conformance.model.settings import RunFile, ServerOptions, Settings
    from hicache_conformance.protocol.server_info import ServerInfo


class ServerUnderTest(NamedTuple):
    """The server of a run, and what it says of itself."""

    options: ServerOptions
    server: RemoteServer
    http: HttpClient
    info: ServerInfo


_SERVER: Final = pytest.StashKey[ServerUnderTest]()


class ServerTarget:
    """Base of `MetadataConformance`, without its cases."""

    driver: ClassVar[str] = ""
    """Address of the server, or the command that starts it."""

    @pytest.fixture
    def context(self, request: pytest.FixtureRequest) -> Iterator[ServerContext]:
        """Provide the context of a case; a case whose needs are not declared is skipped."""
        options, server, http, info = request.config.stash[_SERVER]
        mark = request.node.get_closest_marker(CASE_MARK)
        missing = [need for need in mark.kwargs["needs"] if need in info.undeclared]
        if missing:
            raise NotPromised(f"the server does not declare {missing[0]}")
        # The case before may have killed it, or it fell.
        if not server.is_running():
            server.start()
        settings = settings_of(request.config)
        context = ServerContext(
            server=server,
            server_info=info,
            http=http,
            case=request.node.name,
            seed=settings.seed,
            run=settings.run,
            profile=PROFILES[settings.profile],
            patience=options.patience,
            tokens=options.tokens,
        )
        with closing(context):
            yield context


def check_server(config: pytest.Config, run: RunFile, writer: StreamWriter) -> None:
    """Start or reach the server of a run, ask what it declares, and write the header.

    Raises:
        pytest.UsageError: that is not possible; the reason has been written down.
    """
    options = run.server
    assert options is not None
    server = RemoteServer(options.url)
    if options.start_server:
        # In the run's directory, which goes also where this process is killed.
        server = Served(command=options.start_server, directory=Path(run.stream).parent)
    http = HttpClient(server.url, options.tokens.get("admin", ""))
    config.add_cleanup(lambda: server.__exit__())
    config.add_cleanup(http.close)
    try:
        server.start()
        info = look(http, server, options.lease_seconds)
    except (CannotBeginError, Violation) as error:
        writer.broken(str(error))
        raise pytest.UsageError(str(error)) from error
    found = config.stash[_SERVER] = ServerUnderTest(options, server, http, info)
    writer.header(_header(found, run.settings))


def _header(found: ServerUnderTest, settings: Settings) -> Header:
    options, server, _, info = found
    about, lease = info.about, info.lease_seconds
    return Header(
        driver=server.url,
        subject="server",
        contract="HiCache metadata",
        again=options.again,
        distribution=about.server if about else "an unnamed server",
        seed=settings.seed,
        profile=settings.profile,
        levels=[str(level) for level in settings.levels],
        spec_version=protocol_version(),
        suite_version=installed_version(SUITE),
        capabilities={str(need): need in info.declared for need in Need},
        undeclared=info.undeclared,
        options={
            "parts": ", ".join(options.parts),
            "durability": str(about.durability) if about else "not told",
            "lease_seconds": "for ever" if lease is None else f"{lease:g}",
            "quarantine_seconds": f"{info.limits.quarantine_seconds:g}" if about else "not told",
            "patience": f"{options.patience:g}",
        },
        environment={"platform": platform.platform(), "python": platform.python_version()},
    )
