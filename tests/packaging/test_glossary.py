"""Words that the glossary has replaced are in no identifier, no file name and no docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "hicache_storage",
    "backends",
    "conformance",
    "metadata_server",
    "benchmarks",
    "examples",
    "scripts",
    "tests",
)
RETIRED = {
    "bury": "ForkServer.kill",
    "bystander": "global state",
    "contender": "candidate",
    "crew": "thread pool, or client pool",
    "crowd": "small store, fill",
    "desk": "handlers",
    "dialect": "interface profile",
    "distrust": "invalidate",
    "errand": "pending request",
    "executioner": "killer",
    "nursery": "fork server",
    "rehearsal": "random run",
    "residency": "slot ownership",
    "residue": "leak check",
    "shelf": "bundle set",
    "stopwatch": "timing",
    "story": "counterexample",
    "tamper": "corrupt",
    "troubles": "named faults",
    "vouch": "confirm",
}
"""Words that are retired from names and docstrings, with the term that replaced each."""
RETIRED_NAMES = {
    "check_alike": "rank consistency",
    "AnswerBook": "IdempotencyCache",
    "Asked": "RequestHead",
    "Backups": "StorageBackups, NodeWriteBack",
    "Board": "ChangeFeed",
    "Drafts": "TempFiles",
    "Folds": "Compaction",
    "Front": "ProtocolApp",
    "Ground": "FaultInjector",
    "Holding": "HeldSlots",
    "Lab": "CaseContext",
    "Landing": "prefetch buffers",
    "MarkPool": "placeholder pool",
    "Marker": "WriterCursor",
    "Notices": "ChangeFeed",
    "Numbers": "IdAllocator",
    "PageBook": "PagePatterns",
    "PassingError": "RetryableError",
    "Patient": "Target",
    "Recency": "LRU order",
    "RefusedError": "RequestError",
    "Said": "Response",
    "ScopeOfSlots": "SlotScope",
    "SilentError": "NoResponseError",
    "Stage": "ProcessGroup",
    "Strike": "ActiveFaults",
    "Subject": "StorageUnderTest",
    "TooManyError": "RateLimitedError",
    "Tour": "AttemptPlan",
}
"""Names whose words prose may use."""
RETIRED_PREFIXES = {"see": "check", "most": "max", "longest": "max", "least": "min"}
"""Of functions and constants."""
KEPT = {"least_recent", "longest_axis", "longest_prefix", "longest_read", "longest_write"}
"""Names that do not limit anything."""
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def defined_in(tree: ast.AST) -> set[str]:
    """Every name that a module defines."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return found


def docstrings_in(tree: ast.AST) -> list[str]:
    """All docstrings, those of attributes included."""
    return [
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def words(name: str) -> set[str]:
    """The words of an identifier, in lower case, without a plural's "s"."""
    found = {word.lower() for word in WORD.findall(name)}
    return found | {word.removesuffix("s") for word in found}


def retired_in(path: Path) -> dict[str, str]:
    """The retired words and names in a module, with what to write instead."""
    tree = ast.parse(path.read_text())
    names = {*defined_in(tree), path.stem}
    written = set[str]().union(*map(words, {*names, *docstrings_in(tree)}))
    found = {word: term for word, term in RETIRED.items() if word in written}
    found |= {name: term for name, term in RETIRED_NAMES.items() if name in names}
    for name in names:
        if name.lstrip("_") in KEPT:
            continue
        prefix, _, rest = name.lstrip("_").lower().partition("_")
        if rest and prefix in RETIRED_PREFIXES:
            found[name] = f"{RETIRED_PREFIXES[prefix]}_{rest}"
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_retired_word_is_left(path):
    if path != Path(__file__):
        assert not retired_in(path)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("class Nursery: ...", "nursery"),
        ("def bury(): ...", "bury"),
        ("def f(bystanders): ...", "bystander"),
        ("self.crew = 1", "crew"),
        ('"""A stopwatch."""', "stopwatch"),
        ("class Said: ...", "Said"),
        ("MOST_KEYS = 3", "MOST_KEYS"),
        ("def _see_order(): ...", "_see_order"),
    ],
)
def test_a_retired_word_is_found(tmp_path, text, word):
    path = tmp_path / "module.py"
    path.write_text(text)
    assert list(retired_in(path)) == [word]
