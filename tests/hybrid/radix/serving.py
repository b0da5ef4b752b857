"""Requests that a cache in miniature has served."""

from __future__ import annotations

from tests.support.waiting import eventually

PAGE, GRID = 2, 4
LONG = tuple(range(10, 27))
"""Eight pages and a token; four checkpoints."""


def served(world, tokens, *checkpoints):
    """Run a request to its end; more checkpoints are cached than the one at the end of its
    prompt."""
    for end in (*checkpoints, len(tokens)):
        world.visit(tokens[:end])
    world.settle()


def fetch(world, tokens):
    assert world.cache.prefetch_from_storage("r", tokens)
    eventually(lambda: world.cache.poll() or world.cache.check_prefetch("r"))
