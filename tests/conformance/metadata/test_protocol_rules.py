"""The rules, the document and the cases of the metadata protocol agree."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import msgspec
import pytest

from hicache_conformance.protocol import suite
from hicache_conformance.protocol.rules import (
    LEVELS,
    Need,
    Part,
    parse_parts,
    protocol_rules,
    rules_of,
)
from hicache_conformance.protocol.suite import cases_of_parts, protocol_cases
from hicache_metadata_server import protocol

DOCUMENT = (Path(__file__).parents[3] / "docs" / "metadata-protocol.md").read_text("utf-8")


def test_the_document_lists_every_rule_in_its_words():
    published = dict(
        re.findall(
            r"^- \*\*(MD-[A-Z]+-\d+)\*\* (.*?)(?: \*\(needs \w+\)\*)?$", DOCUMENT, re.MULTILINE
        )
    )
    assert published == {rule.id: rule.text for rule in protocol_rules().values()}


def test_the_document_names_every_route_with_its_token():
    for route in protocol.ROUTES.values():
        name = f"GET {route.path}" if route.method == "GET" else route.path
        row = next(line for line in DOCUMENT.splitlines() if line.startswith(f"| `{name}`"))
        assert f"| {route.token} |" in row
        for kind in filter(None, (route.request, route.answer)):
            assert f"`{kind.__name__}`" in row
    for operation, (kind, token) in protocol.SGLANG_ROUTES.items():
        row = next(
            line for line in DOCUMENT.splitlines() if line.startswith(f"| `/{{rank}}/{operation}`")
        )
        assert row.endswith(f"| {token} |")
        for field in msgspec.structs.fields(kind):
            assert field.name == "namespace" or f"`{field.name}`" in row


def test_rules_say_what_and_why():
    for rule in protocol_rules().values():
        assert rule.text.endswith("."), rule.id
        assert len(rule.why) > 40, rule.id
        assert set(rule.levels) <= set(LEVELS), rule.id
        assert not rule.needs or rule.needs in list(Need), rule.id
        assert rule.part is Part.NATIVE or rule.needs != "native", rule.id


def test_cases_cite_rules_and_levels_that_exist():
    for case in protocol_cases().values():
        assert case.summary, case.name
        for rule in case.rules:
            assert set(case.levels) & set(protocol_rules()[rule].levels), (case.name, rule)
        assert set(case.needs) <= set(Need), case.name
        if any(protocol_rules()[rule].part is Part.NATIVE for rule in case.rules):
            assert "native" in case.needs, case.name


def test_every_rule_has_a_case_in_each_of_its_levels():
    for rule in protocol_rules().values():
        for level in rule.levels:
            assert [
                case
                for case in protocol_cases().values()
                if rule.id in case.rules and level in case.levels
            ], (
                rule.id,
                level,
            )


def test_every_case_belongs_to_a_part():
    assert set(cases_of_parts(tuple(Part))) == set(protocol_cases())
    compatible = cases_of_parts([Part.COMPATIBLE])
    assert compatible
    assert not any("native" in case.needs for case in compatible.values())
    assert set(rules_of([Part.COMPATIBLE])) | set(rules_of([Part.NATIVE])) == set(protocol_rules())


def test_no_name_of_one_group_of_cases_hides_another_s():
    names = [
        name
        for base in suite.MetadataConformance.__bases__
        for name in vars(base)
        if inspect.isfunction(vars(base)[name])
    ]
    assert len(names) == len(set(names))


def test_parts_are_read_as_text():
    assert parse_parts("native, compatible") == (Part.COMPATIBLE, Part.NATIVE)
    assert parse_parts("") == parse_parts("all") == tuple(Part)
    with pytest.raises(ValueError, match="unknown part 'nativ'"):
        parse_parts("nativ")
