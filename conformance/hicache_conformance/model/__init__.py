"""Rules, cases, fault plans, outcomes and verdicts: the data of a conformance run."""
