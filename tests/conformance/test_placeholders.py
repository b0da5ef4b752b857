"""`{tmp}`, `{unique}` and `{port:NAME}` in the options of a driver."""

from __future__ import annotations

from hicache_conformance.fixtures.context import DriverSetup
from hicache_conformance.model.settings import unique_name
from hicache_storage.tools.options import TMP
from tests.conformance.records import case_context

OPTIONS = {
    "path": "{tmp}/store",
    "min_free": "0",
    "url": "http://127.0.0.1:{port:a}/{unique}",
    "lanes": 4,
}


def context_of(tmp_path, run, case):
    unique = unique_name(run, case)
    config = DriverSetup("file", OPTIONS).filled(tmp_path, {"a": 80}, unique)
    return case_context(tmp_path, config=config, run=run, case=case, unique=unique)


def test_reports_keep_what_differs_from_run_to_run():
    assert DriverSetup("file", OPTIONS).filled(TMP) == OPTIONS


def test_each_case_and_each_store_apart_has_names_of_its_own(tmp_path):
    contexts = [
        context_of(tmp_path, run, case) for run, case in (("r", "one"), ("r", "two"), ("s", "one"))
    ]
    stores = [one.config for one in contexts]
    stores += [context.apart()[0] for context in contexts for _ in range(2)]
    assert len({store["url"] for store in stores}) == len(stores)
    assert all(str(store["url"]).startswith("http://127.0.0.1:80/") for store in stores)
    assert {str(store["path"]) for store in stores[:3]} == {f"{tmp_path}/store"}
    assert len({store["path"] for store in stores[3:]}) == 6
    assert {store["lanes"] for store in stores} == {4}
    # Only the run and the case decide, so that a case run again finds its store.
    assert context_of(tmp_path, "r", "one").config == stores[0]
    for context in contexts:
        context.close()
