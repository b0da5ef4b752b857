"""The guide for authors: every command in it is run, in order, in a fresh environment, and says what the guide quotes."""

from __future__ import annotations

import itertools
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from author import ROOT, Author

from hicache_storage.tools.scaffold import check_name, package_files

GUIDE = ROOT / "docs" / "write-a-driver.md"


@dataclass
class Step:
    """A command, the lines that it is said to print, and its exit status."""

    command: str
    quoted: list[str] = field(default_factory=list)
    status: int = 0


def steps(guide: str) -> list[Step]:
    """The commands of all console blocks. `$ echo $?` and the number after it belong to the command before."""
    found: list[Step] = []
    for block in re.findall(r"^```console\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(Step(line[2:]))
            else:
                found[-1].quoted.append(line)
    for before, step in itertools.pairwise(found):
        if step.command == "echo $?":
            before.status = int(step.quoted[0])
    return [step for step in found if step.command != "echo $?"]


def printed(quoted: str, output: str) -> bool:
    """Whether a line was printed: spaces and figures may differ, drawn keys too, and what `[...]` at its end stands for."""
    line, rest = re.subn(r"\[\.\.\.\]$", "", quoted)
    expected = _without_figures(line)
    said = [_without_figures(each) for each in output.splitlines()]
    return any(each.startswith(expected) for each in said) if rest else expected in said


def _without_figures(line: str) -> str:
    line = re.sub(r"'page\d+-[0-9a-f]{32}'", "'page'", " ".join(line.split()))
    return re.sub(r"\b\d+(?:\.\d+)?(?= (?:ms|s|pass|cases|more)\b)", "0", line)


def test_every_command_says_what_the_guide_quotes(tmp_path):
    author = Author(tmp_path)
    author.install(ROOT)
    where = tmp_path
    for step in steps(GUIDE.read_text("utf-8")):
        moved = re.fullmatch(r"cd (\S+)", step.command)
        if moved:
            where = (where / moved[1]).resolve(strict=True)
            continue
        done = author.shell(step.command, cwd=where)
        assert done.returncode == step.status, f"$ {step.command}\n{done.stdout}"
        for quoted in step.quoted:
            assert quoted == "..." or printed(quoted, done.stdout), f"$ {step.command}\nquoted: {quoted}\n{done.stdout}"


def test_the_package_comes_from_the_author_s_own_environment(tmp_path):
    author = Author(tmp_path)
    author.install(ROOT)
    where = "import hicache_storage as s, hicache_demo_driver as d; print(s.__file__, d.__file__)"
    done = author.shell(f"hicache new demo && pip install -q ./demo && python -P -c '{where}'")
    assert all(path.startswith(str(author.scripts.parent)) for path in done.stdout.splitlines()[-1].split()), done.stdout


def test_the_guide_shows_the_generated_package_as_it_is():
    text, files = GUIDE.read_text("utf-8"), package_files(check_name("demo"))
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for name in ("plugin.py", "config.py", "driver.py"):
        assert files[f"hicache_demo_driver/{name}"] in blocks, name
    assert files["tests/test_conformance.py"] in blocks
    assert any(block in files["pyproject.toml"] for block in blocks if "entry-points" in block)


def test_the_guide_names_every_capability_that_binds_a_rule():
    from hicache_conformance.manifest import all_needs

    text = GUIDE.read_text("utf-8")
    for need in all_needs():
        assert f"`{need.partition('>=')[0]}=" in text, need


@pytest.mark.parametrize(
    ("quoted", "said", "same"),
    [
        ("35 pass (rules); 221 cases in 8.7 s", "36 pass (rules); 9 cases in 12 s", True),
        (
            "fail ID-1: page 0 key 'page0-64b169b49e33d4a7f4f0c8bb736f3fdd' x [...]",
            "fail ID-1: page 0 key 'page3-" + "a" * 32 + "' x [test_y]",
            True,
        ),
        ("option  default  meaning", " option   default   meaning ", True),
        ("fail ID-1: page", "fail ID-3: page", False),
        ("conformant: every rule", "non-conformant: breaks ID-1", False),
        ("conformant: every rule", "conformant: every rule of some", False),
    ],
)
def test_quoted_lines_are_compared(quoted, said, same):
    assert printed(quoted, said) is same


def test_steps_know_their_exit_status():
    first, second = steps("```console\n$ false\nout\n$ echo $?\n1\n```\n```console\n$ true # not a comment of ours\n```\n")
    assert (first.command, first.quoted, first.status) == ("false", ["out"], 1)
    assert (second.status, second.quoted) == (0, [])
