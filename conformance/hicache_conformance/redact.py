"""Takes secrets out of what goes into reports."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_SECRET: Final = re.compile(r"pass(word|wd|phrase)?|secret|token|credential|auth|api_?key|access_?key|private", re.IGNORECASE)
_USERINFO: Final = re.compile(r"(?<=//)[^/@\s]+@")
HIDDEN: Final = "***"


def redacted(options: Mapping[str, object]) -> dict[str, str]:
    """Options as text, in the order of their names; passwords and the like, and users in addresses, are hidden."""
    return {name: HIDDEN if _SECRET.search(name) else _USERINFO.sub(f"{HIDDEN}@", str(options[name])) for name in sorted(options)}
