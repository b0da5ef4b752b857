"""Runs of the suite against servers of this process, or of processes of their own."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache_conformance.model.outcomes import Outcome
from hicache_conformance.model.rules import Level
from hicache_conformance.model.settings import Settings
from hicache_conformance.model.verdict import Verdict
from hicache_conformance.protocol.rules import Part
from hicache_conformance.protocol.runner import RunRequest, judge_run, run
from hicache_conformance.protocol.server import RemoteServer, Served
from hicache_conformance.protocol.suite import protocol_cases
from tests.conformance.metadata.faulty import FAULTS, server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_conformance.model.verdict import Judgement


@contextmanager
def listening(fault: str = "", **options: object) -> Iterator[RemoteServer]:
    """A reference server of this process."""
    made = server(fault, **options)
    thread = threading.Thread(
        target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield RemoteServer(f"http://127.0.0.1:{made.server_address[1]}")
    finally:
        made.shutdown()
        made.server_close()
        thread.join()


def served(fault: str = "") -> Served:
    """One in a process of its own, which can be killed."""
    named = f" --fault {fault}" if fault else ""
    command = f"{sys.executable} -m tests.conformance.metadata.reference_server --port {{port}} --journal {{tmp}}/journal{named}"
    return Served(command=command)


def judged(
    place: RemoteServer,
    *,
    seed: int = 1,
    levels: tuple[Level, ...] = tuple(Level),
    tokens: bool = False,
    **options: object,
) -> Judgement:
    """The verdict on a server."""
    given = {"admin": "all", "read": "look", "write": "write"} if tokens else {}
    settings = Settings.fresh(seed, "smoke", levels)
    order = RunRequest(
        server=place, settings=settings, tokens=given, **{"parts": tuple(Part), **options}
    )
    return judge_run(order, run(order))


def judged_fault(name: str, seed: int = 1) -> Judgement:
    """The verdict on a faulty server, by the cases of the rules that it breaks."""
    fault = FAULTS[name]
    cases = fault.only or [
        case.name for case in protocol_cases().values() if set(fault.breaks) & set(case.rules)
    ]
    if fault.restarts:
        with served(name) as place:
            return judged(place, seed=seed, cases=cases)
    with listening(name) as place:
        levels = tuple(level for level in Level if level is not Level.DURABLE)
        return judged(place, seed=seed, cases=cases, levels=levels, tokens=bool(fault.tokens))


def broken(judgement: Judgement) -> dict[str, str]:
    """The rules that a server breaks, and what was said."""
    return {
        result.rule.id: result.reason
        for result in judgement.rules
        if result.outcome is Outcome.FAIL
    }


def conforms_entirely(judgement: Judgement) -> None:
    """A server keeps every rule, and none went untested."""
    assert errors(judgement) == []
    assert broken(judgement) == {}
    assert judgement.verdict is Verdict.CONFORMANT
    assert {str(result.outcome) for result in judgement.rules} == {"pass"}


def errors(judgement: Judgement) -> list[str]:
    """Where the suite itself broke."""
    return [case.detail for case in judgement.failures() if case.outcome is Outcome.ERROR]
