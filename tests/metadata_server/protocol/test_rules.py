"""docs/metadata-protocol.md names every route, and each of its rules has a test."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from hicache_metadata_server import protocol

HERE = Path(__file__).parent
DOCUMENT = (HERE.parents[2] / "docs" / "metadata-protocol.md").read_text("utf-8")
ELSEWHERE = {
    "MD-HTTP-1": "test_fuzz.py::test_random_requests",
    "MD-REQ-5": "test_fuzz.py::test_random_requests",
    "MD-REQ-7": "test_app.py::test_short_requests_are_served_between_long_ones",
    "MD-DUR-1": "test_real_server.py::test_every_acknowledged_change_survives_kill_9",
    "MD-DUR-2": "test_real_server.py::test_every_acknowledged_change_survives_kill_9",
    "MD-IDEM-2": "test_real_server.py::test_what_was_answered_holds_after_kill_9",
    "MD-LEASE-6": "test_late_writers.py::test_an_old_lease_is_stale_for_good",
    "MD-QUAR-3": "test_late_writers.py::test_a_scope_that_is_made_anew_gives_no_slot_before_leases",
    "MD-OPS-6": "test_drop.py::test_a_scope_in_use_stays_and_an_empty_one_goes",
    "MD-AUTH-1": "test_refusals.py::test_every_route_refuses_and_does_nothing",
    "MD-AUTH-2": "test_refusals.py::test_every_route_refuses_and_does_nothing",
    "MD-AUTH-3": "test_origins.py::test_every_route_refuses_pages_of_other_sites_and_does_nothing",
}
"""Rules whose tests are about more than the protocol."""


def test_every_rule_has_a_test():
    rules = re.findall(r"^- \*\*(MD-[A-Z]+-\d+)\*\* \S.*\.", DOCUMENT, re.MULTILINE)
    named = {
        rule
        for path in HERE.glob("test_*.py")
        for rule in re.findall(r"MD-[A-Z]+-\d+", path.read_text("utf-8"))
    }
    assert len(set(rules)) == len(rules)
    assert named == set(rules)
    for test in ELSEWHERE.values():
        file, _, name = test.partition("::")
        assert f"def {name}" in (HERE.parent / file).read_text("utf-8"), test


def test_the_document_names_every_route_with_its_token():
    for route in protocol.ROUTES.values():
        name = f"GET {route.path}" if route.method == "GET" else route.path
        row = next(line for line in DOCUMENT.splitlines() if line.startswith(f"| `{name}`"))
        assert f"| {route.token} |" in row
        for kind in filter(None, (route.request, route.answer)):
            assert f"`{kind.__name__}`" in row
    for route in protocol.SGLANG_ROUTES.values():
        row = next(line for line in DOCUMENT.splitlines() if line.startswith(f"| `{route.path}`"))
        assert row.endswith(f"| {route.token} |")
        for field in msgspec.structs.fields(route.request):
            assert field.name == "namespace" or f"`{field.name}`" in row
