"""Rules, cases, fault plans, outcomes and verdicts: the data of a conformance run."""

from typing import Final

RUN_VARIABLE: Final = "HICACHE_CONFORMANCE_RUN"
"""Environment variable by which `hicache conformance run` tells the processes of a run where its
`Settings` are. Here, where neither pytest nor the SDK is imported."""
OUTCOME_PROPERTY: Final = "hicache_outcome"
"""User property of the last report of a case: its class, and all that is known of it, as JSON."""
PLUGINS: Final = "plugins"
"""Directory in the home of a run, with the entry point of its foreign driver."""
CASE_MARK: Final = "hicache_case"
MESSAGE: Final = "hicache_message"
"""Stands for a case where the start of one carries what the worker of a run tells its controller:
the event of pytest-xdist that arrives at once, whatever the next call does to the process. Its
location holds the kind of the message and, as JSON, its content."""
STARTING_SECONDS: Final = 240.0
"""Patience with a worker in which no case runs: it starts, or opens the driver for the first time."""
FULL_STATUS: Final = 75
"""Exit status of a worker that another one has to replace."""
