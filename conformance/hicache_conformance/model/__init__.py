"""Rules, cases, fault plans, outcomes and verdicts: the data of a conformance run."""

from typing import Final

RUN_VARIABLE: Final = "HICACHE_CONFORMANCE_RUN"
"""Environment variable by which `hicache conformance run` tells the processes of a run where its
`Settings` are. Here, where neither pytest nor the SDK is imported."""
OUTCOME_PROPERTY: Final = "hicache_outcome"
"""User property of the last report of a case: its class, and all that is known of it, as JSON."""
PLUGINS: Final = "plugins"
"""Directory in the home of a run, with the entry point of its foreign driver."""
