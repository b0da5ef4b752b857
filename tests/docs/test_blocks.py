"""Extraction of blocks from a page, and comparison with their output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.docs.blocks import blocks
from tests.docs.reader import PageError, Reader

if TYPE_CHECKING:
    from pathlib import Path


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
