"""Servers with one planted fault each are found out, by the rule that they break.

The reference server is not blamed.
"""

from __future__ import annotations

import pytest

from hicache_conformance.model.outcomes import Outcome
from hicache_conformance.model.rules import Level
from hicache_conformance.model.verdict import Verdict
from hicache_conformance.protocol.rules import protocol_rules
from tests.conformance.metadata.faulty import FAULTS
from tests.conformance.metadata.judging import (
    broken,
    errors,
    judged,
    judged_fault,
    listening,
    served,
)

pytestmark = [pytest.mark.slow(seconds=45), pytest.mark.long]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name):
    judgement = judged_fault(name)
    assert set(FAULTS[name].breaks) <= set(broken(judgement))
    assert not errors(judgement)
    assert judgement.verdict is Verdict.NON_CONFORMANT


def test_every_rule_is_broken_by_some_fault():
    assert set(protocol_rules()) == {rule for fault in FAULTS.values() for rule in fault.breaks}


def test_the_faults_of_the_shipped_server_are_among_them():
    assert {"D2", "D3", "D4", "D5", "D6", "D7", "D8", "D16", "D20"} <= {
        fault.field_fault for fault in FAULTS.values()
    }


def test_the_reference_server_conforms():
    # Killing takes a process of its own; tokens show only where they are given.
    with listening(tokens=True) as url:
        judgement = judged(
            url=url,
            levels=tuple(level for level in Level if level is not Level.DURABLE),
            tokens=True,
        )
    assert not broken(judgement)
    assert not errors(judgement)
    left = {
        result.rule.id: result.reason
        for result in judgement.rules
        if result.selected and result.outcome is not Outcome.PASS
    }
    assert set(left) == {"MD-API-2"}
    assert "--start-server" in left["MD-API-2"]


def test_the_reference_server_survives_kills():
    judgement = judged(start_server=served(), levels=(Level.DURABLE,))
    assert judgement.verdict is Verdict.CONFORMANT
    assert judgement.count(Outcome.PASS) == 6
