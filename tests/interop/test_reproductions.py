"""What docs/matrix.md says about drivers of others, shown with the drivers alone.

Each script stands for one driver, and its arguments are rules.
"""

from __future__ import annotations

import pytest

from hicache_conformance.interfaces.interface import known
from tests.support.reproductions import ROOT, failing_rules, reproduce, scripts

pytestmark = [pytest.mark.interop, pytest.mark.long, pytest.mark.timeout(300)]

KNOWN = known("sglang")


@pytest.fixture(scope="module", params=scripts("sglang"))
def shown(request):
    """The script of a driver, and what it has printed about each of its rules."""
    return request.param, *reproduce(KNOWN[request.param].reproductions)


def test_every_failure_is_there(shown):
    _, ran, found = shown
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert found


def test_every_failing_rule_of_the_matrix_has_one(shown):
    driver, _, found = shown
    failing = failing_rules(driver)
    if KNOWN[driver].not_judged:
        assert f"`{driver}`" in (ROOT / "docs" / "matrix.md").read_text()
        assert not failing
    else:
        assert failing
        assert failing <= set(found)
