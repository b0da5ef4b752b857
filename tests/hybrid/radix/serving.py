"""Requests that a cache in miniature has served."""

from __future__ import annotations

from tests.support.waiting import eventually

PAGE, GRID = 2, 4
LONG = tuple(range(10, 27))
"""Eight pages and a token; four checkpoints."""


def served(world, tokens, *checkpoints):
    """Run a request to its end; more checkpoints are cached than the one at the end of its
    prompt."""
    for end in checkpoints:
        request = world.start(tokens[:end])
        world.running.remove(request)
        world.drop(request)
    request = world.start(tokens)
    world.running.remove(request)
    world.drop(request)
    world.settle()


def fetch(world, tokens):
    assert world.cache.prefetch_from_storage("r", tokens)
    eventually(lambda: world.cache.poll() or world.cache.check_prefetch("r"))
