"""Profiles: the number of random trials of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Sizes of the randomised cases; by default those of the profile `default`."""

    name: str
    histories: int = 100
    """Random histories of the state machine."""
    steps: int = 30
    """Calls in each of them."""
    chains: int = 1000
    """Random chains of each existence case, beyond the exhaustive small ones."""
    policies: int = 16
    """Policies, or pairs of them, that each small presence map is asked under; of 10 and 16, drawn
    at random."""
    thread_calls: int = 200
    """Calls of each thread of the concurrent cases."""
    store_fills: int = 4
    """How often stores of limited capacity are filled again."""
    plans: int = 24
    """Random plans of faults, on each injector."""
    plan_steps: int = 20
    """Random calls under each of them."""
    process_calls: int = 200
    """Calls of each thread of the cases with several processes."""
    kills: int = 16
    """Processes killed in each case that is about that."""
    outages: int = 3
    """How often one of several stores is away, in each case about that; the next one each time."""
    shrinks: bool = True
    """Whether a failing history is made as short as possible."""
    recovery_seconds: float = 15.0
    """How long after a fault a storage may go on answering misses; a circuit breaker or a reconnect
    needs a few of them."""
    grace_seconds: float = 5.0
    """Time for what a closed storage had begun to end; a working driver needs none of it."""


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            name="smoke",
            histories=8,
            steps=15,
            chains=50,
            policies=4,
            thread_calls=30,
            store_fills=2,
            plans=4,
            plan_steps=10,
            process_calls=60,
            kills=4,
            outages=2,
            # Shrinking repeats a failing history many times; a quick run leaves that to a run of the
            # case by its name.
            shrinks=False,
            recovery_seconds=5.0,
            grace_seconds=2.0,
        ),
        Profile(name="default"),
        Profile(
            name="soak",
            histories=1500,
            steps=120,
            chains=20_000,
            thread_calls=5_000,
            store_fills=40,
            plans=400,
            plan_steps=40,
            process_calls=2_000,
            kills=200,
            outages=9,
        ),
    )
}


def parse_profile(text: str) -> str:
    """Return the name of a profile.

    Raises:
        ValueError: there is none of this name.
    """
    if text not in PROFILES:
        raise ValueError(f"unknown profile {text!r}; profiles are {', '.join(PROFILES)}")
    return text
