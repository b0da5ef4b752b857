"""Generations differ between any two writes, those of forked children too."""

from __future__ import annotations

import os

from hicache_storage.objects import namespace


def test_forked_children_draw_generations_of_their_own():
    seen = []
    for _ in range(2):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.write(writer, namespace.seal(bytes(32), "key", 0))
            os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        seen.append(os.read(reader, 64))
        os.close(reader)
    assert len({*seen, namespace.seal(bytes(32), "key", 0)}) == 3
