from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.backends.file.harness import Rig

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


MakeRig = Callable[..., Rig]
