"""What docs/matrix.md says about vLLM's and LMCache's own drivers, shown with these alone."""

from __future__ import annotations

import pytest

from hicache_conformance.interfaces.interface import all_known
from tests.support.reproductions import failing_rules, reproduce, scripts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.mark.parametrize("driver", scripts("vllm-tier", "lmcache-l2"))
def test_every_failure_of_the_matrix_is_there(driver):
    ran, found = reproduce(all_known()[driver].reproductions)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    failing = failing_rules(driver)
    assert failing
    assert failing <= set(found)
