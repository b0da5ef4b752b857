"""Many processes on one directory: acknowledged pages are found, also after kills."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.backends.file.harness import Rig, bundle_bytes, chain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

pytestmark = pytest.mark.slow(seconds=25)

# A fork is a process as good as any, and need not import torch again.
FORK = multiprocessing.get_context("fork")


class Child:
    """A process that runs `play(connection)`."""

    def __init__(self, play: Callable[[Connection], None]):
        self.pipe, other = FORK.Pipe()
        self.process = FORK.Process(target=_play, args=(play, other, self.pipe))
        self.process.start()
        other.close()

    def ask(self, *question: object) -> object:
        self.pipe.send(question)
        assert self.pipe.poll(30), "the child does not answer"
        return self.pipe.recv()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(30)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(30)
        assert self.process.exitcode == 0


def _play(play: Callable[[Connection], None], connection: Connection, parents: Connection) -> None:
    parents.close()
    play(connection)


def serving(path: Path, **options: object) -> Callable[[Connection], None]:
    """A process that does what it is asked with a rig of its own."""

    def play(connection: Connection) -> None:
        rig = Rig(path, **options)
        while (question := connection.recv()) is not None:
            name, *arguments = question
            target = rig.storage if name in ("delete", "clear") else rig
            connection.send(getattr(target, name)(*arguments))
        rig.storage.close()

    return play


def test_the_directory_is_made_by_whoever_comes_first(rig, tmp_path):
    children = [Child(serving(tmp_path / "store")) for _ in range(4)]
    for number, child in enumerate(children):
        child.pipe.send(("put", chain(f"{number}", 2)))
    assert [child.pipe.recv() for child in children] == [[True, True]] * 4
    fresh = rig()
    assert all(fresh.holds(chain(f"{number}", 2)) for number in range(4))
    for child in children:
        child.end()


def test_what_was_acknowledged_survives_a_kill_at_any_instant(rig, tmp_path):
    path, chance = tmp_path / "store", random.Random(5)
    reader = rig(path, pages=24)

    def play(connection: Connection) -> None:
        name, writer = connection.recv(), Rig(path, pages=24)
        for number in range(10_000):
            connection.send(("begun", number))
            keys = chain(f"{name}/{number}", 24)
            if number % 3 == 2:
                writer.storage.delete(chain(f"{name}/{number - 1}", 24)[::5])
                connection.send(("deleted", number - 1))
            answer = writer.put(keys)
            connection.send(("set", number, answer))

    for round_number in range(25):
        child = Child(play)
        child.pipe.send(f"round {round_number}")
        child.pipe.recv()
        time.sleep(chance.random() * 0.025)
        child.kill()
        begun, acknowledged, deleted = 0, list[int](), list[int]()
        with contextlib.suppress(EOFError):
            while True:
                event = child.pipe.recv()
                if event[0] == "set":
                    assert event[2] == [True] * 24
                    acknowledged.append(event[1])
                elif event[0] == "deleted":
                    deleted.append(event[1])
                else:
                    begun = event[1]
        # `recv` above took the first "begun"; a delete that was under way may have happened or not.
        for side in (reader, rig(path, pages=24)):
            for number in acknowledged[-4:]:
                keys = chain(f"round {round_number}/{number}", 24)
                found = side.versions(keys)
                if number in deleted:
                    assert [version is None for version in found] == [
                        page % 5 == 0 for page in range(24)
                    ]
                elif number != begun - 1:
                    assert found == [0] * 24
                else:
                    assert [version for page, version in enumerate(found) if page % 5] == [0] * 19
            last = side.versions(chain(f"round {round_number}/{begun}", 24))
            assert last in ([0] * 24, [None] * 24)
    fresh = rig(path, pages=24)
    fresh.storage.open()
    assert os.listdir(fresh.store.paths.temporaries) == []


@contextlib.contextmanager
def standing(children: list[Child]) -> Iterator[None]:
    """Nobody of them does anything meanwhile, so that a listing counts no file beside the one that
    has replaced it."""
    for child in children:
        os.kill(child.process.pid, signal.SIGSTOP)
    try:
        for child in children:
            # Told when all its threads have stopped.
            os.waitid(os.P_PID, child.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        yield
    finally:
        for child in children:
            os.kill(child.process.pid, signal.SIGCONT)


def test_three_processes_keep_one_capacity_while_some_are_killed(rig, tmp_path):
    batch = bundle_bytes(16)
    path, limit, chance = tmp_path / "store", int(batch * 6.5), random.Random(7)

    def play(connection: Connection) -> None:
        writer = Rig(path, pages=16, capacity=limit)
        for number in range(100_000):
            if connection.poll():
                break
            writer.put(chain(f"{os.getpid()}/{number % 40}", 1 + number * 7 % 16))
        writer.storage.close()

    def used() -> int:
        files = [*path.rglob("*.bundle"), *path.rglob("*.temporary")]
        return sum(file.stat().st_size for file in files)

    children = [Child(play) for _ in range(3)]
    most, until = 0, time.monotonic() + 3
    while time.monotonic() < until or most <= limit // 2:
        for _ in range(20):
            with standing(children):
                most = max(most, used())
        if chance.random() < 0.2:
            victim = children.pop(0)
            victim.kill()
            children.append(Child(play))
    for child in children:
        child.end()
    # A bundle that is shortened is copied first, and each of them may be at that.
    assert most <= limit + len(children) * batch
    last = rig(path, pages=16, capacity=limit)
    last.put(chain("last", 16))
    assert used() <= limit
    assert last.holds(chain("last", 16))
    assert used() > limit // 2


def test_two_who_take_pages_out_of_one_bundle_do_not_undo_each_other(rig, tmp_path):
    path = tmp_path / "store"
    here, there = rig(path), Child(serving(path))
    for turn in range(30):
        keys = chain(f"{turn}", 12)
        here.put(keys)
        assert there.ask("hit", keys) == 12
        there.pipe.send(("delete", keys[1::3]))
        here.storage.delete(keys[::3])
        assert there.pipe.recv() == [True] * 4
        expected = [None, None, 0] * 4
        assert here.versions(keys) == expected
        assert there.ask("versions", keys) == expected
    assert rig(path).versions(chain("29", 12)) == [None, None, 0] * 4
    there.end()


def test_one_key_set_by_two_and_given_up_by_one(rig, tmp_path):
    # D11: an aborted writer must not take the other one's page out of the books.
    path = tmp_path / "store"
    here, there = rig(path, capacity="1MiB"), Child(serving(path, capacity="1MiB"))
    for turn in range(20):
        keys = chain(f"{turn}", 4)
        there.pipe.send(("put", keys))
        here.put(keys, version=1, seconds=1e-9 if turn % 2 else 30)
        assert there.pipe.recv() == [True] * 4
        for side in (here, rig(path, capacity="1MiB")):
            assert side.hit(keys) == 4
            assert set(side.versions(keys, (0, 1))) <= {0, 1}
    fresh = rig(path, capacity="1MiB")
    assert fresh.store.capacity.used() == sum(file.stat().st_size for file in fresh.bundles())
    there.end()
