"""SGLang's own metadata server, as a process of its own, judged by the black box: its known faults
are found, by their rules."""

from __future__ import annotations

import sys

import pytest

from hicache_conformance.model.outcomes import Outcome
from hicache_conformance.model.rules import Level
from hicache_conformance.model.settings import RunFile, ServerOptions, Settings
from hicache_conformance.model.verdict import Verdict, judge
from hicache_conformance.protocol.rules import Part, rules_of
from hicache_conformance.protocol.suite import cases_of_parts
from hicache_conformance.runner.child_process import run

# A run against a server takes minutes where the processors are busy.
pytestmark = [pytest.mark.interop, pytest.mark.long, pytest.mark.timeout(900)]

SERVE = (
    f"{sys.executable} -m sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server --host "
    f"127.0.0.1 --port {{port}} "
    "--persistence-path {tmp}/state.json --save-interval 1"
)
# What this machine's clock, or chance, could decide is not among them.
KNOWN = {
    "MD-INIT-2": "D8",
    "MD-INIT-3": "D16",
    "MD-RES-2": "D4",
    "MD-RES-3": "D4",
    "MD-RES-4": "D5",
    "MD-RES-6": "D5",
    "MD-SLOT-2": "D5",
    "MD-CONF-2": "D6",
    "MD-CONF-3": "D6",
    "MD-CONF-4": "D6",
    "MD-SLOT-1": "D6",
    "MD-EV-2": "D7",
    "MD-DUR-1": "D3",
    "MD-REQ-1": "D16",
    "MD-REQ-2": "D16",
    "MD-REQ-3": "D16",
    "MD-REQ-5": "D16",
}
KEPT = (
    "MD-INIT-1",
    "MD-SCOPE-1",
    "MD-SCOPE-2",
    "MD-FIND-1",
    "MD-FIND-2",
    "MD-RES-5",
    "MD-CONF-1",
    "MD-DEL-1",
    "MD-EV-1",
    "MD-BIG-1",
)


def judged(levels=tuple(Level), cases=(), **options):
    server = ServerOptions(start_server=SERVE, **options)
    settings = Settings.fresh(1, "smoke", levels)
    stream = run(RunFile(settings=settings, server=server, cases=list(cases))).stream
    parts = server.parts
    return judge(stream, levels, cases_of_parts(parts), rules_of(parts)), stream


@pytest.fixture(scope="module")
def judgement():
    """The verdict on the whole; that its reservations end after 2 s is what an operator might
    believe."""
    return judged(lease_seconds=2.0)[0]


def outcomes(judgement):
    return {result.rule.id: result.outcome for result in judgement.rules}


@pytest.mark.parametrize(("rule", "fault"), KNOWN.items())
def test_a_known_fault_is_found(judgement, rule, fault):
    assert outcomes(judgement)[rule] is Outcome.FAIL, fault


@pytest.mark.parametrize("rule", KEPT)
def test_what_it_does_right_is_not_blamed(judgement, rule):
    assert outcomes(judgement)[rule] is Outcome.PASS


def test_nothing_is_the_suite_s_own_fault(judgement):
    assert judgement.verdict is Verdict.NON_CONFORMANT
    assert not [case.detail for case in judgement.failures() if case.outcome is Outcome.ERROR]


def test_the_native_part_is_not_declared(judgement):
    native = [result for result in judgement.rules if result.rule.part is Part.NATIVE]
    assert {result.outcome for result in native} == {Outcome.NOT_DECLARED}


def test_leases_that_nobody_speaks_of_are_not_declared():
    judgement, stream = judged(levels=(Level.CORE,), cases=["abandoned"], parts=(Part.COMPATIBLE,))
    assert stream.header is not None
    assert "leases" in stream.header.undeclared
    assert outcomes(judgement)["MD-RES-6"] is Outcome.NOT_DECLARED
