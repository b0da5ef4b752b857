"""The pytest plugin: options, a marker, and outcomes on their way to a report.

It is loaded by every pytest of an environment that has the suite installed, so everything but its
hooks waits in `session` until a conformance case is collected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hicache_conformance.model.pytest_keys import CASE_MARK, CASE_PROPERTY, DRAWN_INPUT, drawn_seed

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_conformance.runner.session import Session


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the suite."""
    group = parser.getgroup("hicache", "HiCacheStorage conformance")
    group.addoption(
        "--hicache-level",
        metavar="LEVELS",
        default="all",
        help="levels to run, comma-separated (default: all)",
    )
    group.addoption(
        "--hicache-seed",
        metavar="N",
        type=int,
        help="seed of everything random (default: drawn, and printed)",
    )
    group.addoption(
        "--hicache-profile", metavar="NAME", default="default", help="smoke, default or soak"
    )
    group.addoption(
        "--hicache-page-bytes",
        metavar="BYTES",
        default="0",
        help="make every page a multiple of so many bytes long, such as 4KiB",
    )
    group.addoption(
        "--hicache-report",
        metavar="DIR",
        help="write the conformance report here; without 'conformant' exit with 1",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the hooks that need to remember something."""
    config.addinivalue_line(
        "markers", f"{CASE_MARK}(rules, levels, ...): a conformance case and the rules it tests"
    )
    config.pluginmanager.register(_Hooks(config), "hicache-conformance-hooks")


class _Hooks:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._session: Session | None = None

    def _begin(self) -> Session:
        if self._session is None:
            from hicache_conformance.runner.session import Session

            self._session = Session(self._config)
        return self._session

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if any(_is_case(item) for item in items):
            self._begin().select(items, [item for item in items if _is_case(item)])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        if self._session is not None and call.excinfo is not None and _is_case(item):
            self._session.note_violation(item, call.excinfo.value)
        return (yield)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._session is not None:
            self._session.started(nodeid)

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if self._session is not None and self._session.is_over():
            item.session.shouldstop = "the run goes on in another process"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if any(name == CASE_PROPERTY for name, _ in report.user_properties):
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
        # pytest-xdist: all workers take their chances from one seed.
        node.workerinput[DRAWN_INPUT] = drawn_seed(self._config)


def _is_case(item: pytest.Item) -> bool:
    mark = item.get_closest_marker(CASE_MARK)
    return mark is not None and "rules" in mark.kwargs
