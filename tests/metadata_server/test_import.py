"""SGLang's persistence file, in both forms, whole and contradicting itself."""

from __future__ import annotations

import json
import random

import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.core.sglang import SglangService
from hicache_metadata_server.core.sglang_import import (
    ImportFileError,
    import_scopes,
    read_persistence_file,
)
from tests.metadata_server.services import reserve
from tests.support.commands import run_metadata


def written(ranks):
    """A file as SGLang's server writes it."""
    return json.dumps(ranks, indent=4).encode()


def rank(pages, stored):
    free = [page for page in range(pages) if page not in stored.values()]
    return {"num_pages": pages, "free_pages": free, "key_to_index": list(stored.items())}


def imported(body, tenant=""):
    service = MetadataService()
    found = read_persistence_file(body)
    import_scopes(service, found, 100.0, tenant)
    return service, found


@pytest.mark.parametrize("form", ["{0}:kv", "{0}"])
def test_both_forms_give_the_same_answers(form):
    chance = random.Random(3)
    pages = chance.sample(range(200), 120)
    stored = {f"{chance.getrandbits(256):064x}": page for page in pages}
    ranks = {form.format(0): rank(200, stored), form.format(7): rank(10, {"x": 9})}
    service, found = imported(written(ranks), "acme")
    old = SglangService(service)
    for number, keys, slots in ((0, stored, list(stored.values())), (7, ["x"], [9])):
        answer = old.get_page_indices(number, p.SglangKeys(keys=[*keys, "missing"]), 101.0)
        assert answer == {"indices": [*slots, None]}
    assert [len(scope.dropped) for scope in found] == [0, 0]
    assert list(service.fsck(p.Fsck()))[-1].problems == []
    assert {scope.tenant for scope in service.list_scopes().scopes} == {"acme"}
    # All other slots can be had.
    asked = p.SglangReserve(keys=[(f"n{i}", "") for i in range(80)])
    new = old.reserve_and_allocate_page_indices(0, asked, 101.0)
    assert sorted(slot for _, slot in new["indices"]) == sorted(set(range(200)) - set(pages))


def test_what_contradicts_itself_is_dropped_and_counted():
    keys = [["right", 0], ["freed", 5], ["one", 1], ["other", 1], ["twice", 2], ["twice", 3]]
    keys += [["far", 10], ["low", -1], ["", 4], [7, 8], ["bool", True]]
    torn = {"num_pages": 10, "free_pages": [5, 6, 6, -1, "x"], "key_to_index": keys}
    service, (scope,) = imported(written({"0:kv": torn}))
    assert scope.pages == [("right", 0)]
    assert dict(scope.dropped) == {
        "a page that is free as well": 1,
        "a page of several keys": 2,
        "a key that stands several times": 2,
        "a page outside the file": 3,
        "no key, or longer than the limit": 2,
    }
    assert scope.lost == 2, "slots 7 and 9 are neither free nor anybody's"
    status = service.list_scopes().scopes[0]
    assert (status.live, status.free) == (1, 9)


def test_the_order_of_use_comes_along():
    service, _ = imported(written({"0": rank(2, {"old": 0, "new": 1})}))
    reserve(service, ["next"], now=101.0)
    old, new = service.scopes["0:kv"].lru.slots(["old", "new"])
    assert old < 0 <= new


NOTHING = rank(5, {})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no persistence file"),
        (b"[]", "no persistence file"),
        (b'{"0:kv": {"num_pages": 5}}', "no persistence file"),
        (written({"x:kv": NOTHING}), "no rank"),
        (written({"0:kv": {**NOTHING, "num_pages": -5}}), "has -5 pages"),
        (written({"0:kv": NOTHING, "0": NOTHING}), "twice"),
    ],
    ids=["empty", "a list", "a part", "no rank", "negative", "twice"],
)
def test_other_files_are_refused(body, said):
    with pytest.raises(ImportFileError, match=said):
        read_persistence_file(body)


def test_the_command(tmp_path):
    file, store = tmp_path / "sglang.json", f"sqlite:///{tmp_path}/m.db"
    torn = {**rank(5, {}), "free_pages": [1]}
    file.write_bytes(written({"0:kv": rank(50, {f"k{i}": i for i in range(20)}), "0:mamba": torn}))

    def done(*arguments):
        found = run_metadata(*arguments)
        return found.exit_code, " ".join(found.output.split())

    status, told = done("import", file, "--store", store)
    assert status == 0, told
    assert "0:kv: 20 pages in 50 slots" in told
    assert "0:mamba: 0 pages in 5 slots; 4 lost slots are free again" in told
    assert done("fsck", "--store", store) == (0, "55 slots checked, no problems")
    status, told = done("import", file, "--store", store)
    assert (status, "has 0:kv, 0:mamba already" in told) == (2, True)
    assert done("import", tmp_path / "none", "--store", store)[0] == 2
    assert done("import", file, "--store", f"{store}2", "--tenant", "a b")[0] == 2
