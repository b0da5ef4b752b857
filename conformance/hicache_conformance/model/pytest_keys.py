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
