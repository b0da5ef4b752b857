"""Names that the pytest plugin, the session and the fixtures share.

The mark, the report properties, and the seed.

The plugin is loaded by every pytest of an environment that has the suite installed, so this module
imports nothing of the suite.
"""

from __future__ import annotations

import secrets
from typing import Final

import pytest

CASE_MARK: Final = "hicache_case"
CASE_PROPERTY: Final = "hicache_case"
"""User property of each report of the suite: rules, levels and class of the case, as JSON."""
CALLS_PROPERTY: Final = "hicache_calls"
"""User property of a report: the last calls of the case, a line each."""
CHECKS_PROPERTY: Final = "hicache_checks"
"""User property of a report: the rules that the case has judged, as JSON."""
CONTEXT_PROPERTY: Final = "hicache_context"
"""User property of a report: driver, capabilities and redacted options, as JSON."""
GATE_PROPERTY: Final = "hicache_gate"
"""User property of a report: what the case needs and the driver does not declare."""
PLANS_PROPERTY: Final = "hicache_plans"
"""User property of a report: the fault plans that the case injected below the driver, as JSON."""
VIOLATION_PROPERTY: Final = "hicache_violation"
"""User property of a report: the broken rule, its message and its causes, as JSON."""
MESSAGE: Final = "hicache_message"
"""Stands for a case where the start of one carries what the worker of a run tells its controller:
the event of pytest-xdist that arrives at once, whatever the next call does to the process. Its
location holds the kind of the message and, as JSON, its content."""
STARTING_SECONDS: Final = 240.0
"""Patience with a worker in which no case runs: it starts, or opens the driver for the first time."""
FULL_STATUS: Final = 75
"""Exit status of a worker that another one has to replace."""
DRAWN_INPUT: Final = "hicache_drawn"
"""Key of a pytest-xdist worker's input: the seed and the name of the controller's run."""

_DRAWN = pytest.StashKey[tuple[int, str]]()


def drawn_seed(config: pytest.Config) -> tuple[int, str]:
    """Seed and name of this run: drawn once for a session and its pytest-xdist workers.

    Unless an option gives the seed.
    """
    # A worker draws nothing by itself: each would have another seed, and the report names one.
    from_controller: dict[str, tuple[int, str]] | None = getattr(config, "workerinput", None)
    if from_controller is not None:
        return from_controller[DRAWN_INPUT]
    if _DRAWN not in config.stash:
        seed = config.getoption("--hicache-seed")
        config.stash[_DRAWN] = (
            secrets.randbelow(2**32) if seed is None else seed,
            secrets.token_hex(4),
        )
    return config.stash[_DRAWN]
