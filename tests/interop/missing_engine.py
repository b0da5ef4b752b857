"""Stand-in for test modules whose engine is not installed: they fail, they are not skipped."""

from __future__ import annotations

import pytest

MISSING = """{engine} is not installed here, and these tests are about nothing else.
Build an environment that has it and run them there:

    scripts/make_{name}_env.sh .venv-{name}
    .venv-{name}/bin/python -m pytest -m {marker} {folder}

or leave them out with -m "not {marker}"."""


class NeedsEngine(pytest.Module):
    """A test module that cannot be imported without its engine: one test, which fails.

    Args:
        engine: its name.
        marker: of the tests of that engine.
    """

    def __init__(self, *, engine: str = "", marker: str = "", **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]  # what pytest passes on
        self.marker = marker
        folder = f"tests/{self.path.parent.name}"
        self.missing = MISSING.format(
            engine=engine, name=engine.lower(), marker=marker, folder=folder
        )

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
