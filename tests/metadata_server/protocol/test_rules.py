"""docs/metadata-protocol.md names every route, and each of its rules has a test."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from hicache_metadata_server import protocol

TESTS = Path(__file__).parents[1]
DOCUMENT = (TESTS.parents[1] / "docs" / "metadata-protocol.md").read_text("utf-8")


def test_every_rule_has_a_test():
    rules = re.findall(r"^- \*\*(MD-[A-Z]+-\d+)\*\* \S.*\.", DOCUMENT, re.MULTILINE)
    assert len(set(rules)) == len(rules)
    texts = [path.read_text("utf-8") for path in TESTS.glob("**/test_*.py")]
    assert set(re.findall(r"MD-[A-Z]+-\d+", "".join(texts))) == set(rules)


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
