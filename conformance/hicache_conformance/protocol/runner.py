"""Runner of the protocol's cases against one server, one after the other."""

from __future__ import annotations

import platform
import time
import traceback
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from hicache_conformance.model.outcomes import CaseOutcome, Header, Outcome, OutcomeStream
from hicache_conformance.model.profiles import PROFILES
from hicache_conformance.model.verdict import judge
from hicache_conformance.model.violation import Inconclusive, Violation
from hicache_conformance.protocol.context import ServerContext
from hicache_conformance.protocol.http_client import HttpClient
from hicache_conformance.protocol.rules import LEVELS, Need, Part, protocol_version, rules_of
from hicache_conformance.protocol.server import CannotStartError
from hicache_conformance.protocol.server_info import CannotBeginError, look
from hicache_conformance.protocol.suite import MetadataConformance, cases_of_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_conformance.model.case import Case
    from hicache_conformance.model.settings import Settings
    from hicache_conformance.model.verdict import Judgement
    from hicache_conformance.protocol.server import RemoteServer
    from hicache_conformance.protocol.server_info import ServerInfo

DETAIL_LIMIT = 12_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Parameters of a run: the server, the settings and the selected cases."""

    server: RemoteServer
    settings: Settings
    parts: tuple[Part, ...] = tuple(Part)
    tokens: dict[str, str] = field(default_factory=dict[str, str])
    """By what they permit; `admin` is the one that the suite works with."""
    lease_seconds: float | None = None
    """How long reservations of a server without a native part last; None where they last for
    ever."""
    patience: float = 15.0
    """Seconds that a case may wait for the server's own clock."""
    again: str = "hicache conformance metadata"
    """Command that begins such a run again."""
    cases: Sequence[str] = ()
    """Names that a case must contain one of; empty for all."""


def run(
    request: RunRequest, progress: Callable[[OutcomeStream], None] = lambda stream: None
) -> OutcomeStream:
    """Run the cases of the request's parts and levels; the server is there already."""
    http = HttpClient(request.server.url, request.tokens.get("admin", ""))
    with closing(http):
        return _run(request, http, progress)


def _run(
    request: RunRequest, http: HttpClient, progress: Callable[[OutcomeStream], None]
) -> OutcomeStream:
    stream = OutcomeStream()
    try:
        server_info = look(http, request.server, request.lease_seconds)
    except (CannotBeginError, Violation) as error:
        stream.broken = str(error)
        return stream
    stream.header = _header(request, server_info)
    chosen = [case for case in cases_of_parts(request.parts).values() if _wants(request, case)]
    stream.cases = len(chosen)
    suite = MetadataConformance()
    for case in chosen:
        stream.running = CaseOutcome(
            case=case.name, rules=case.rules, levels=_levels(case), outcome=Outcome.UNTESTED
        )
        progress(stream)
        stream.outcomes.append(_outcome(request, server_info, http, suite, case))
        stream.running = None
        progress(stream)
    stream.finished = True
    return stream


def judge_run(request: RunRequest, stream: OutcomeStream) -> Judgement:
    """The verdict on what `run` has written down."""
    levels = [level for level in request.settings.levels if level in LEVELS]
    return judge(stream, levels, cases_of_parts(request.parts), rules_of(request.parts))


def _wants(request: RunRequest, case: Case) -> bool:
    if not set(case.levels) & set(request.settings.levels):
        return False
    return not request.cases or any(text in case.name for text in request.cases)


def _levels(case: Case) -> tuple[str, ...]:
    return tuple(map(str, case.levels))


def _outcome(
    request: RunRequest,
    server_info: ServerInfo,
    http: HttpClient,
    suite: MetadataConformance,
    case: Case,
) -> CaseOutcome:
    begin = time.monotonic()
    outcome, reason, detail, broken = _tried(request, server_info, http, suite, case)
    return CaseOutcome(
        case=case.name,
        rules=case.rules,
        levels=_levels(case),
        outcome=outcome,
        reason=reason,
        detail=detail[:DETAIL_LIMIT],
        broken_rule=broken,
        seconds=round(time.monotonic() - begin, 4),
    )


def _tried(
    request: RunRequest,
    server_info: ServerInfo,
    http: HttpClient,
    suite: MetadataConformance,
    case: Case,
) -> tuple[Outcome, str, str, str]:
    """Outcome, reason, detail and broken rule of a case."""
    missing = [need for need in case.needs if need in server_info.undeclared]
    if missing:
        return Outcome.NOT_DECLARED, f"the server does not declare {missing[0]}", "", ""
    settings = request.settings
    try:
        if not request.server.is_running():
            request.server.start()
        context = ServerContext(
            server=request.server,
            server_info=server_info,
            http=http,
            case=case.name,
            seed=settings.seed,
            run=settings.run,
            profile=PROFILES[settings.profile],
            patience=request.patience,
            tokens=request.tokens,
        )
        with closing(context):
            getattr(suite, case.name)(context)
    except Violation as violation:
        text = str(violation)
        return (
            Outcome.FAIL,
            text.partition("\n")[0],
            "\n".join([text, *getattr(violation, "__notes__", [])]),
            violation.rule,
        )
    except Inconclusive as untestable:
        return Outcome.UNTESTED, str(untestable), "", ""
    except CannotStartError as error:
        text = f"MD-HTTP-1: the server does not come up: {error}"
        return Outcome.FAIL, text.partition("\n")[0], text, "MD-HTTP-1"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the suite's fault and not the server's
        return (
            Outcome.ERROR,
            f"the suite itself broke: {type(error).__name__} {error}",
            traceback.format_exc(),
            "",
        )
    return Outcome.PASS, "", "", ""


def _header(request: RunRequest, server_info: ServerInfo) -> Header:
    try:
        suite = version("hicache-storage")
    except PackageNotFoundError:
        suite = "not installed"
    about = server_info.about
    return Header(
        driver=request.server.url,
        subject="server",
        contract="HiCache metadata",
        again=request.again,
        distribution=about.server if about else "an unnamed server",
        seed=request.settings.seed,
        profile=request.settings.profile,
        levels=[str(level) for level in request.settings.levels if level in LEVELS],
        spec_version=protocol_version(),
        suite_version=suite,
        capabilities={str(need): need in server_info.declared for need in Need},
        undeclared=server_info.undeclared,
        options={
            "parts": ", ".join(request.parts),
            "durability": str(about.durability) if about else "not told",
            "lease_seconds": "for ever"
            if server_info.lease_seconds is None
            else f"{server_info.lease_seconds:g}",
            "quarantine_seconds": f"{server_info.limits.quarantine_seconds:g}"
            if about
            else "not told",
            "patience": f"{request.patience:g}",
        },
        environment={"platform": platform.platform(), "python": platform.python_version()},
    )
