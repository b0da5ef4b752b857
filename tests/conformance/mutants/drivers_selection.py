"""A pytest plugin: runs of each sample only what it is tried with.

Of a mutant no more than it takes to find it.

Where the environment variable `HICACHE_SAMPLES` is `mutants`, the cases that are left when a mutant
was found by every rule meant for it are skipped, unless the sample asks for `every_case`.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from drivers_plugin import SAMPLES

from hicache_conformance.model.pytest_keys import CASE_MARK, VIOLATION_PROPERTY

if TYPE_CHECKING:
    from sample_driver import SampleDriver


class _Found:
    """What is known about one mutant so far."""

    def __init__(self, sample: SampleDriver) -> None:
        self._left = set(sample.breaks)
        self._told = not sample.expect_message
        self._sample = sample

    def note(self, violation: dict[str, str], rules: tuple[str, ...]) -> None:
        """Take a violation; one that names no rule breaks all those that its case is about."""
        self._left -= {violation["rule"]} if violation["rule"] else set(rules)
        self._told |= self._sample.expect_message in violation["detail"]

    @property
    def enough(self) -> bool:
        return not self._left and self._told and not self._sample.every_case


_found = dict[str, _Found]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if not _is_wanted(item)]
    if left_out:
        items[:] = [item for item in items if _is_wanted(item)]
        config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    found = _found.get(_driver(item))
    if found is not None and found.enough:
        pytest.skip("untested: the mutant has been found")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    sample, violations = (
        SAMPLES.get(_driver(item)),
        [text for name, text in item.user_properties if name == VIOLATION_PROPERTY],
    )
    if sample is None or not sample.breaks or os.environ.get("HICACHE_SAMPLES") != "mutants":
        return
    mark = item.get_closest_marker(CASE_MARK)
    assert mark is not None
    for text in violations:
        _found.setdefault(_driver(item), _Found(sample)).note(
            json.loads(str(text)), mark.kwargs["rules"]
        )


def _driver(item: pytest.Item) -> str:
    return str(getattr(getattr(item, "cls", None), "driver", ""))


def _is_wanted(item: pytest.Item) -> bool:
    """Return whether a sample names this case and its injector, or names none.

    The case with its parameters or without.
    """
    sample = SAMPLES.get(_driver(item))
    if sample is None:
        return True
    named = not sample.cases or not {item.name, item.name.partition("[")[0]}.isdisjoint(
        sample.cases
    )
    injector = item.callspec.params.get("injector") if hasattr(item, "callspec") else None
    return named and (not sample.injectors or injector is None or injector in sample.injectors)
