"""What `benchmarks/field.py` computes from what it has measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def field(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    import field

    yield field
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def run(field):
    """`file` at half of the limit and twice as fast as the peer; the limit is that of two threads."""
    made = field.Run()
    for size in (1 << 20, 64 << 10):
        for side, seconds in (
            ("limit, 1 thread", 0.4),
            ("limit, 2 threads", 0.1),
            ("file", 0.2),
            ("file, before", 0.1),
            ("vLLM `fs`", 0.4),
        ):
            for noise in (1.0, 0.5, 2.0):
                one = made.of(side, (size, 1, 32, "read, cached"))
                one.add(noise * seconds, noise * seconds / 2)
        for _ in range(3):
            made.of("file", (size, 1, 32, "exists")).add(5e-5, 5e-5)
    return made


def test_the_table_has_the_part_of_the_limit_and_the_ratio_to_the_fastest_peer(field, run):
    run.report.missing["SGLang NIXL POSIX"] = "no wheel"
    run.note("requests a page, 1 MiB, write, file", 1.5)
    text = field.report(run)
    # 32 MiB in 0.1 s; the file driver takes 0.2, and the peer 0.4.
    assert "| read, cached | 1 MiB | 1 x 32 | 0.34 | 0.50, 2.00x | 0.25 |" in text
    assert "| SGLang NIXL POSIX | no wheel |" in text
    assert "| 64 KiB | 32 | 50 |" in text
    # 0.1 s of CPU time for 32 pages.
    assert "| read, cached | 1 MiB | 1 x 32 | 1562 | 3125 | 6250 |" in text
    assert "| read, cached | 1 MiB | 1 x 32 | file | 0.50x | 0.50x |" in text
    assert "| requests a page, 1 MiB, write, file | 1.50 |" in text


def test_a_wrong_answer_is_no_result(field, run):
    from interleaved import Timed

    timed = Timed(31, 1.0, 1.0)
    with pytest.raises(AssertionError, match="file: exists answered 31"):
        run.time("file", (1 << 20, 1, 32, "exists"), lambda: timed, expect=32)


@pytest.mark.parametrize("option", ["--sizes", "--calls", "--sides"])
def test_an_unknown_value_is_refused_before_anything_starts(field, option, capsys):
    with pytest.raises(SystemExit):
        field.parsed([option, "nothing"])
    assert f"{option}: unknown ['nothing']; there are" in capsys.readouterr().err


def test_a_side_runs_the_code_of_its_checkout(field, tmp_path):
    """A side in a process of its own: it is told to, and says, which code it runs."""
    setup = field.Setup("limit", tmp_path / "limit", 4096, 1, "", "page_first", False, 1)
    side = field.Process("limit", sys.executable, "field_sides", ROOT, setup)
    side.wait_until_up()
    assert side.ask("write", ["a", "b"]).answer
    side.ask("forget", 2)
    assert side.ask("read", ["a", "b"]).answer
    assert side.ask("is_sound", 2).answer
    side.close()
    assert not list((tmp_path / "limit").iterdir())
