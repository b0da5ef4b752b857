"""The pytest plugin: options, a marker, and outcomes on their way to a report.

It is loaded by every pytest of an environment that has the suite installed, so everything but its
hooks waits in `session` until a conformance case is collected.
"""

from __future__ import annotations

import faulthandler
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from hicache_conformance.model import (
    CASE_MARK,
    OUTCOME_PROPERTY,
    PLUGINS,
    RUN_VARIABLE,
    STARTING_SECONDS,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_conformance.runner.session import Session

DRAWN_INPUT: Final = "hicache_drawn"
"""Key of a pytest-xdist worker's input: the seed and the name of the controller's run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the suite."""
    group = parser.getgroup("hicache", "HiCacheStorage conformance")
    for name, metavar, default, text in (
        ("level", "LEVELS", "all", "levels to run, comma-separated (default: all)"),
        ("profile", "NAME", "default", "smoke or default"),
        ("page-bytes", "BYTES", "0", "make every page a multiple of so many bytes, such as 4KiB"),
        ("report", "DIR", None, "write the report here; without 'conformant' exit with 1"),
    ):
        group.addoption(f"--hicache-{name}", metavar=metavar, default=default, help=text)
    drawn = "seed of everything random (default: drawn, and printed)"
    group.addoption("--hicache-seed", metavar="N", type=int, help=drawn)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the hooks that need to remember something."""
    config.addinivalue_line(
        "markers", f"{CASE_MARK}(rules, levels, ...): a conformance case and the rules it tests"
    )
    is_worker = hasattr(config, "workerinput")
    if RUN_VARIABLE not in os.environ:
        config.pluginmanager.register(_Hooks(config), "hicache-conformance-hooks")
    elif is_worker:
        _begin_worker()
        config.pluginmanager.register(_WorkerHooks(config), "hicache-conformance-hooks")
    # Else it is the controller of a command line, which has a plugin of its own.


def _begin_worker() -> None:
    """Make a worker of a command line's run a session of its own, with the log of the run."""
    # So that what a driver has started ends with the run.
    os.setsid()
    home = Path(os.environ[RUN_VARIABLE]).parent
    # Here, as pytest-xdist replaces what PYTHONPATH has put there.
    sys.path.insert(0, str(home / PLUGINS))
    log = (home / "log").open("a")
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    log.close()
    _end_after(STARTING_SECONDS)


def _end_after(seconds: float) -> None:
    """Say where each thread is, and end the process, unless another time is set before.

    By a thread of C: a driver may keep the interpreter's lock.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)


class _Hooks:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._session: Session | None = None
        seed: int | None = config.option.hicache_seed
        drawn = secrets.randbelow(2**32) if seed is None else seed, secrets.token_hex(4)
        # All workers of pytest-xdist take their chances from one seed, which the report names.
        from_controller: dict[str, tuple[int, str]] = getattr(config, "workerinput", {})
        self._drawn = from_controller.get(DRAWN_INPUT, drawn)
        config.option.hicache_seed, config.option.hicache_run = self._drawn

    def _begin(self) -> Session:
        if self._session is None:
            from hicache_conformance.runner.session import Session

            self._session = Session(self._config)
        return self._session

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if any(_is_case(item) for item in items):
            self._begin().select(items, [item for item in items if _is_case(item)])

    # Outside of pytest's own, which decides on expected failures.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if self._session is not None and _is_case(item):
            self._session.take_phase(item, call.excinfo.value if call.excinfo else None, report)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if any(name == OUTCOME_PROPERTY for name, _ in report.user_properties):
            self._begin().reported(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._session is not None:
            self._session.finish(session)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._session is not None:
            self._session.summarise(terminalreporter)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[DRAWN_INPUT] = self._drawn


class _WorkerHooks(_Hooks):
    """Hooks of the worker of a command line's run."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._begin().end_full_process()
        _end_after(self._begin().settings.case_seconds)
        try:
            return (yield)
        finally:
            _end_after(STARTING_SECONDS)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        # pytest cancels it when the case has raised.
        _end_after(self._begin().settings.case_seconds)


def _is_case(item: pytest.Item) -> bool:
    mark = item.get_closest_marker(CASE_MARK)
    return mark is not None and "rules" in mark.kwargs
