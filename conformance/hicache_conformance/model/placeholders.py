"""The placeholders of options and commands: `{tmp}` and `{port:NAME}`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

TMP: Final = "{tmp}"
_PORT: Final = re.compile(r"\{port:([A-Za-z0-9_.-]+)\}")


def filled(text: str, tmp: Path | str, ports: Mapping[str, int]) -> str:
    """The text with its placeholders filled in; a port that is not known stays as it is."""
    # Left as it is: the preflight names the port in its message, where a wrong number would be a
    # connection refused.
    return _PORT.sub(lambda found: str(ports.get(found[1], found[0])), text.replace(TMP, str(tmp)))


def port_names(texts: Iterable[object]) -> list[str]:
    """Names of the ports in texts, each once, in their order; what is no text has none."""
    return list(
        dict.fromkeys(
            name for text in texts if isinstance(text, str) for name in _PORT.findall(text)
        )
    )


def mentions_tmp(texts: Iterable[object]) -> bool:
    """Return whether `{tmp}` stands in one of the texts."""
    return any(TMP in text for text in texts if isinstance(text, str))
