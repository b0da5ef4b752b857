"""Extraction of blocks from a page, and comparison with their output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from blocks import Block, blocks, printed, steps
from reader import PageError, Reader

if TYPE_CHECKING:
    from pathlib import Path

PAGE = """# A page

```console
$ echo one \\
    two
$ cat > file <<'END'
$ no command
END
```

<!-- not run: needs a moon -->
```python
1 / 0
```

<!-- run python
x = 1
-->

- in a list:

  ```json
  {"a": 1}
  ```
"""


def page_of(text: str, directory: Path) -> Path:
    page = directory / "page.md"
    page.write_text(text)
    return page


@pytest.fixture
def read(tmp_path: Path):
    """Read blocks as a page has them, in one environment."""
    made = []

    def read(text: str) -> None:
        page = page_of(text, tmp_path)
        made.append(Reader(tmp_path / str(len(made)), page))
        for block in blocks(page):
            made[-1].read(block)

    (tmp_path / "0").mkdir()
    yield read
    for reader in made:
        reader.close()


def test_blocks_of_a_page(tmp_path):
    found = blocks(page_of(PAGE, tmp_path))
    assert [(block.language, block.line, block.reason) for block in found] == [
        ("console", 4, ""),
        ("python", 13, "needs a moon"),
        ("python", 17, ""),
        ("json", 23, ""),
    ]
    assert found[3].text == '{"a": 1}\n'


def test_commands_go_over_several_lines(tmp_path):
    (first, second) = steps(blocks(page_of(PAGE, tmp_path))[0].text)
    assert first.command == "echo one \\\n    two"
    assert second.command == "cat > file <<'END'\n$ no command\nEND"


def test_a_language_that_nobody_checks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="language 'sh'"):
        blocks(page_of("```sh\nrm -rf /\n```\n", tmp_path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```console\n$ exit 3\n```\n", "exit status 3, not 0"),
        ("```console\n$ true\n$ echo $?\n1\n```\n", "exit status 0, not 1"),
        ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", "line 6"),
        ("```python\nimport os\nos._exit(0)\n```\n", "the interpreter has ended"),
        ("```json\n{,}\n```\n", "is no json"),
        ("```yaml\na: [\n```\n", "is no yaml"),
        ("```toml\na = \n```\n", "is no toml"),
        ("```ini\na = 1\n```\n", "is no ini"),
        (
            "```console\n$ pip install hicache-storage-of-another-name\n```\n",
            "No matching distribution",
        ),
        ("<!-- output is compared -->\n```console\n$ echo one\ntwo\n```\n", "quoted: two"),
    ],
)
def test_what_does_not_do_what_the_page_says_is_found(read, text, said):
    with pytest.raises(PageError, match=said):
        read(text)


def test_a_page_is_read_in_one_environment(read):
    read(
        "```console\n$ mkdir here && cd here\n$ name=value\n$ python -m http.server 18000 --bind "
        "127.0.0.1 &\n"
        "$ [[ $PWD = */here && $name = value ]]\n```\n\n"
        "```python\nfrom urllib.request import urlopen\nassert "
        "urlopen('http://127.0.0.1:18000').status == 200\n```\n"
    )


def test_servers_end_with_the_page(tmp_path):
    page = page_of("```console\n$ python -m http.server 18000 --bind 127.0.0.1 &\n```\n", tmp_path)
    (tmp_path / "home").mkdir()
    reader = Reader(tmp_path / "home", page)
    reader.read(blocks(page)[0])
    reader.close()
    again = Block(page, 1, "console", "$ ! curl -s http://127.0.0.1:18000\n")
    reader.read(again)
    reader.close()


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
    first, second = steps("$ false\nout\n$ echo $?\n1\n$ true # not a comment of ours\n")
    assert (first.command, first.quoted, first.status) == ("false", ["out"], 1)
    assert (second.status, second.quoted) == (0, [])
