"""Runs of the suite against servers of this process, or of processes of their own."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache_conformance.model.outcomes import Outcome
from hicache_conformance.model.rules import Level
from hicache_conformance.model.settings import RunFile, ServerOptions, Settings
from hicache_conformance.model.verdict import Verdict, judge
from hicache_conformance.protocol.rules import rules_of
from hicache_conformance.protocol.suite import cases_of_parts, protocol_cases
from hicache_conformance.runner.child_process import run
from tests.conformance.metadata.faulty import FAULTS, server

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_conformance.model.verdict import Judgement


@contextmanager
def listening(fault: str = "", **options: object) -> Iterator[str]:
    """The address of a reference server of this process."""
    made = server(fault, **options)
    thread = threading.Thread(
        target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_address[1]}"
    finally:
        made.shutdown()
        made.server_close()
        thread.join()


def served(fault: str = "") -> str:
    """The command of one in a process of its own, which can be killed."""
    named = f" --fault {fault}" if fault else ""
    return f"{sys.executable} -m tests.conformance.metadata.reference_server --port {{port}} --journal {{tmp}}/journal{named}"


def judged(
    *,
    seed: int = 1,
    levels: tuple[Level, ...] = tuple(Level),
    tokens: bool = False,
    cases: Sequence[str] = (),
    **options: object,
) -> Judgement:
    """The verdict on a server."""
    given = {"admin": "all", "read": "look", "write": "write"} if tokens else {}
    server = ServerOptions(tokens=given, **options)
    settings = Settings.fresh(seed, "smoke", levels)
    ran = run(RunFile(settings=settings, server=server, cases=list(cases)))
    assert ran.stream.header is not None, ran.log
    return judge(ran.stream, levels, cases_of_parts(server.parts), rules_of(server.parts))


def judged_fault(name: str, seed: int = 1) -> Judgement:
    """The verdict on a faulty server, by the cases of the rules that it breaks."""
    fault = FAULTS[name]
    cases = fault.only or [
        case.name for case in protocol_cases().values() if set(fault.breaks) & set(case.rules)
    ]
    if fault.restarts:
        return judged(start_server=served(name), seed=seed, cases=cases)
    with listening(name) as url:
        levels = tuple(level for level in Level if level is not Level.DURABLE)
        return judged(url=url, seed=seed, cases=cases, levels=levels, tokens=bool(fault.tokens))


def broken(judgement: Judgement) -> dict[str, str]:
    """The rules that a server breaks, and what was said."""
    return {
        result.rule.id: result.reason
        for result in judgement.rules
        if result.outcome is Outcome.FAIL
    }


def conforms_entirely(judgement: Judgement) -> None:
    """A server keeps every rule, and none went untested."""
    assert (found := errors(judgement)) == [], found
    assert (faults := broken(judgement)) == {}, faults
    assert judgement.verdict is Verdict.CONFORMANT
    assert {str(result.outcome) for result in judgement.rules} == {"pass"}


def errors(judgement: Judgement) -> list[str]:
    """Where the suite itself broke."""
    return [case.detail for case in judgement.failures() if case.outcome is Outcome.ERROR]
