"""A pytest plugin: runs of each control only what it is tried with, and of a mutant no more than it takes to find it.

Where the environment variable `HICACHE_CONTROLS` is `mutants`, the cases that are left when a mutant was found by every rule
meant for it are skipped, unless the control asks for `every_case`.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from control_plugin import CONTROLS

from hicache_conformance.model.case import MARK
from hicache_conformance.model.pytest_keys import VIOLATION_PROPERTY

if TYPE_CHECKING:
    from control import Control


class _Found:
    """What is known about one mutant so far."""

    def __init__(self, control: Control) -> None:
        self._left, self._told = set(control.breaks), not control.told
        self._control = control

    def note(self, violation: dict[str, str], rules: tuple[str, ...]) -> None:
        """Take a violation; one that names no rule breaks all those that its case is about."""
        self._left -= {violation["rule"]} if violation["rule"] else set(rules)
        self._told |= self._control.told in violation["detail"]

    @property
    def enough(self) -> bool:
        return not self._left and self._told and not self._control.every_case


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
    control, violations = CONTROLS.get(_driver(item)), [text for name, text in item.user_properties if name == VIOLATION_PROPERTY]
    if control is None or not control.breaks or os.environ.get("HICACHE_CONTROLS") != "mutants":
        return
    mark = item.get_closest_marker(MARK)
    assert mark is not None
    for text in violations:
        _found.setdefault(_driver(item), _Found(control)).note(json.loads(str(text)), mark.kwargs["rules"])


def _driver(item: pytest.Item) -> str:
    return str(getattr(getattr(item, "cls", None), "driver", ""))


def _is_wanted(item: pytest.Item) -> bool:
    """Whether a control names this case, with its parameters or without, and its ground, or names none."""
    control = CONTROLS.get(_driver(item))
    if control is None:
        return True
    named = not control.cases or not {item.name, item.name.partition("[")[0]}.isdisjoint(control.cases)
    ground = item.callspec.params.get("ground") if hasattr(item, "callspec") else None
    return named and (not control.grounds or ground is None or ground in control.grounds)
