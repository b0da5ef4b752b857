from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.backends.file.harness import Hurried, Rig

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def rig(tmp_path: Path):
    """Open rigs, all on one directory unless told otherwise; closed at the end."""
    rigs = list[Rig]()

    def make(path: Path | None = None, **options: object) -> Rig:
        made = Rig(path or tmp_path / "store", **options)
        rigs.append(made)
        return made

    yield make
    for made in rigs:
        made.storage.close()


@pytest.fixture
def guarded(rig):
    """Open rigs behind a deadline, whose driver is `bare`."""
    rigs = list[Rig]()

    def make(**options: object) -> Rig:
        made = rig(**options)
        made.bare, made.storage = made.storage, Hurried(made.storage)
        made.storage.register_mem_host_pool_v2(made.pool, "kv")
        made.storage.open()
        rigs.append(made)
        return made

    yield make
    for made in rigs:
        # What was left behind has ended when this returns.
        made.storage.be_patient()
        made.storage.close()
