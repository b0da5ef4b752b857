"""Stand-in for test modules whose engine is not installed: they fail, they are not skipped."""

from __future__ import annotations

import pytest


class NeedsEngine(pytest.Module):
    """A test module that cannot be imported without its engine: one test, which fails.

    Args:
        marker: of the tests of that engine.
        missing: how to get an environment that has it.
    """

    def __init__(self, *, marker: str = "", missing: str = "", **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]  # what pytest passes on
        self.marker, self.missing = marker, missing

    def collect(self):
        yield _MissingEngine.from_parent(self, name=f"needs_{self.marker}")


class _MissingEngine(pytest.Item):
    parent: NeedsEngine

    def __init__(self, **options):
        super().__init__(**options)
        self.add_marker(self.parent.marker)

    def runtest(self):
        pytest.fail(self.parent.missing, pytrace=False)

    def reportinfo(self):
        return self.path, None, self.nodeid
