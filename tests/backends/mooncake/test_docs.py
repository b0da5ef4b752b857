"""The guide names every option, with its variables and its default."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from hicache_backends.mooncake.config import DEFAULTS, FILE_VARIABLES, VARIABLES, MooncakeConfig

GUIDE = (Path(__file__).parents[3] / "docs" / "mooncake.md").read_text()


def test_the_guide_has_every_option_with_its_variables_and_its_default():
    rows = {name: more for name, *more in re.findall(r"^\| `(\w+)` \|([^|]*)\|([^|]*)\|", GUIDE, re.MULTILINE)}
    fields = {field.name: field.default for field in msgspec.structs.fields(MooncakeConfig)}
    assert rows.keys() == fields.keys()
    for name, own_default in fields.items():
        variables, default = rows[name]
        found = tuple(re.findall(r"`(\w+)`", variables))
        assert found == (FILE_VARIABLES[:1] if name == "config_path" else VARIABLES.get(name, ())), name
        value = DEFAULTS.get(name, "") if own_default is None else own_default
        said = f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
        assert default.strip("` ") == said, name
