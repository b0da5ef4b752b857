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
from tests.support.commands import run_metadata


def written(ranks):
    """A file as SGLang's server writes it."""
    return json.dumps(ranks, indent=4).encode()


def rank(pages, stored):
    free = [page for page in range(pages) if page not in stored.values()]
    return {"num_pages": pages, "free_pages": free, "key_to_index": list(stored.items())}


def imported(body):
    service = MetadataService()
    found = read_persistence_file(body)
    import_scopes(service, found, 100.0)
    return service, found


@pytest.mark.parametrize(
    "form",
    [lambda number, namespace: f"{number}:{namespace}", lambda number, namespace: str(number)],
)
def test_both_forms_give_the_same_answers(form):
    chance = random.Random(3)
    pages = chance.sample(range(200), 120)
    stored = {f"{chance.getrandbits(256):064x}": page for page in pages}
    service, found = imported(
        written({form(0, "kv"): rank(200, stored), form(7, "kv"): rank(10, {"x": 9})})
    )
    old = SglangService(service)
    asked = [*stored, "missing"]
    answer = old.get_page_indices(0, p.SglangKeys(keys=asked), 101.0)
    assert answer == {"indices": [*stored.values(), None]}
    assert old.get_page_indices(7, p.SglangKeys(keys=["x"]), 101.0) == {"indices": [9]}
    assert [len(scope.dropped) for scope in found] == [0, 0]
    assert list(service.fsck(p.Fsck()))[-1].problems == []
    # All other slots can be had.
    new = old.reserve_and_allocate_page_indices(
        0, p.SglangReserve(keys=[(f"n{i}", "") for i in range(80)]), 101.0
    )
    assert sorted(slot for _, slot in new["indices"]) == sorted(set(range(200)) - set(pages))


def test_what_contradicts_itself_is_dropped_and_counted():
    torn = {
        "num_pages": 10,
        "free_pages": [5, 6, 6, -1, "x"],
        "key_to_index": [
            ["right", 0],
            ["freed", 5],
            ["one", 1],
            ["other", 1],
            ["twice", 2],
            ["twice", 3],
            ["far", 10],
            ["low", -1],
            ["", 4],
            [7, 8],
            ["bool", True],
        ],
    }
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
    stored = {"old": 0, "new": 1}
    service, _ = imported(written({"0": rank(2, stored)}))
    service.reserve(p.Reserve(scopes=[p.ReserveScope(scope="0:kv", keys=["next"])]), 101.0)
    old, new = service.scopes["0:kv"].lru.slots(["old", "new"])
    assert old < 0 <= new


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no persistence file"),
        (b"[]", "no persistence file"),
        (b'{"0:kv": {"num_pages": 5}}', "no persistence file"),
        (b'{"x:kv": {"num_pages": 5, "free_pages": [], "key_to_index": []}}', "no rank"),
        (b'{"0:kv": {"num_pages": -5, "free_pages": [], "key_to_index": []}}', "has -5 pages"),
        (
            (
                b'{"0:kv": {"num_pages": 5, "free_pages": [], "key_to_index": []}, "0": {"num_pages": '
                b'5, "free_pages": [], "key_to_index": []}}'
            ),
            "twice",
        ),
    ],
)
def test_other_files_are_refused(body, said):
    with pytest.raises(ImportFileError, match=said):
        read_persistence_file(body)


def test_the_command(tmp_path):
    file, store = tmp_path / "sglang.json", f"sqlite:///{tmp_path}/m.db"
    file.write_bytes(
        written(
            {
                "0:kv": rank(50, {f"k{i}": i for i in range(20)}),
                "0:mamba": {**rank(5, {}), "free_pages": [1]},
            }
        )
    )
    done = run_metadata("import", str(file), "--store", store)
    assert done.exit_code == 0, done.output
    assert "0:kv: 20 pages in 50 slots" in done.output
    assert "0:mamba: 0 pages in 5 slots; 4 lost slots are free again" in done.output
    checked = run_metadata("fsck", "--store", store)
    assert checked.exit_code == 0, checked.output
    assert "55 slots checked, no problems" in checked.output
    again = run_metadata("import", str(file), "--store", store)
    assert again.exit_code == 2
    assert "has 0:kv, 0:mamba already" in " ".join(again.output.split())
    assert run_metadata("import", str(tmp_path / "none"), "--store", store).exit_code == 2
    assert (
        run_metadata("import", str(file), "--store", f"{store}2", "--tenant", "a b").exit_code == 2
    )


def test_the_scopes_become_a_tenants():
    service = MetadataService()
    import_scopes(service, read_persistence_file(written({"0": rank(2, {"k": 0})})), 100.0, "acme")
    assert service.list_scopes().scopes[0].tenant == "acme"
