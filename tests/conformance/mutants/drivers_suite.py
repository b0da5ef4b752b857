"""The suite against the samples, in one pytest, whose plugin this is too.

Run by `test_mutants.py`, which reads the reports. A class runs of each right sample all cases that
it is tried with, and of a mutant no more of them than it takes to find it; of the project's own
driver `memory` all.
"""

from __future__ import annotations

import pytest
from drivers_plugin import SAMPLES

from hicache_conformance import DriverConformance
from hicache_conformance.fixtures.target import DriverTarget
from hicache_conformance.model import CASE_MARK
from hicache_conformance.model.outcomes import Outcome
from hicache_conformance.runner.session import FINDINGS
from hicache_conformance.suite.driver_conformance import catalogue


def _class(name, sample):
    """The suite's class for a driver: the classes of its cases, without the others of these."""
    where = sample.where if sample else ()
    named = {case.partition("[")[0] for case in where if case.startswith("test_")}
    bases = [
        base
        for base in DriverConformance.__bases__
        if not where or base.__name__.removesuffix("Cases") in where or named & vars(base).keys()
    ]
    hidden = {
        case.name: None
        for case in catalogue().values()
        if sample
        and (case.name not in named if named else not set(case.rules) & set(sample.breaks))
    }
    # A case that is named may find a fault of a rule that it is not about.
    hides = sample and (named or sample.breaks)
    return type(
        f"Test{name}",
        (*bases, *([] if DriverTarget in bases else [DriverTarget])),
        {**(hidden if hides else {}), "driver": name, "__module__": __name__},
    )


for _name, _sample in (*SAMPLES.items(), ("memory", None)):
    globals()[f"Test{_name}"] = _class(_name, _sample)


# Selection
# ------------------------------------------------------------------------------------------------

_left = {}
"""Of each mutant that a case has found: the rules, and the message, that none has told yet."""


def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if not _is_wanted(item)]
    if left_out:
        items[:] = [item for item in items if _is_wanted(item)]
        config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item):
    sample = _sample_of(item)
    if sample and not sample.every_case and _left.get(sample.name) == set():
        pytest.skip("untested: the mutant has been found")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    sample = _sample_of(item)
    if sample is None or not sample.breaks:
        return
    mark = item.get_closest_marker(CASE_MARK)
    assert mark is not None
    for found in item.stash.get(FINDINGS, []):
        if found.outcome is Outcome.FAIL:
            left = _left.setdefault(sample.name, {*sample.breaks, sample.message})
            # One that names no rule breaks all those that its case is about.
            left -= {found.broken_rule} if found.broken_rule else set(mark.kwargs["rules"])
            if sample.message in found.detail:
                left.discard(sample.message)


def _sample_of(item):
    return SAMPLES.get(str(getattr(getattr(item, "cls", None), "driver", "")))


def _is_wanted(item):
    """Return whether a sample is tried with this case's parameters, and on its injector."""
    sample = _sample_of(item)
    if sample is None:
        return True
    named = {case for case in sample.where if "[" in case}
    same = [case for case in named if case.partition("[")[0] == item.name.partition("[")[0]]
    injector = item.callspec.params.get("injector") if hasattr(item, "callspec") else None
    return (not same or item.name in same) and (
        not sample.injectors or injector is None or injector in sample.injectors
    )
