"""Command line of an engine, as an operator types it, and the facts that all engines share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final, cast

from hicache_storage.tools.doctor.finding import ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hicache_storage.tools.doctor.finding import Finding

SEED_VARIABLE: Final = "PYTHONHASHSEED"


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """Options and arguments of a command line."""

    options: dict[str, list[str]]
    """Values by the option's name, with dashes; of a flag the empty text."""
    arguments: list[str]

    @classmethod
    def parse(cls, words: Sequence[str]) -> EngineCommand:
        """Sort words into options and arguments.

        An option's value is the next word, unless that is an option itself: which options of an
        engine are flags is not known here.
        """
        options, arguments = dict[str, list[str]](), list[str]()
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if not word.startswith("-") or word == "-":
                arguments.append(word)
                continue
            name, equals, value = word.partition("=")
            if not equals and rest and not rest[0].startswith("-"):
                value = rest.pop(0)
            # vLLM takes underscores for dashes.
            options.setdefault(name.replace("_", "-"), []).append(value)
        return cls(options, arguments)

    def value(self, *names: str, default: str = "") -> str:
        """Return the last value of an option that has several names."""
        return next((self.options[name][-1] for name in names if name in self.options), default)

    def number(self, *names: str, default: int) -> int:
        """Return the last value as a number; the default also for what is none."""
        text = self.value(*names)
        return int(text) if text.isdecimal() else default

    def given(self, *names: str) -> str:
        """Return the first of these options that is given; empty if none is."""
        return next((name for name in names if name in self.options), "")

    def configurations(self, name: str) -> list[str]:
        """Return the values of an option whose value is JSON.

        Its value may be given alone, without the option's name.
        """
        alone = self.arguments[:1] if not self.options and len(self.arguments) == 1 else []
        return self.options.get(name, alone)


def read_object(text: str) -> dict[str, object]:
    """Read a JSON object.

    Raises:
        ValueError: it is no JSON, or no object.
    """
    try:
        found: object = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from error
    if isinstance(found, dict):
        return cast("dict[str, object]", found)
    raise ValueError("is no JSON object")


def object_of(options: Mapping[str, object], name: str) -> dict[str, object]:
    """Return an object in an object; an empty one if there is none."""
    found = options.get(name)
    return cast("dict[str, object]", found) if isinstance(found, dict) else {}


def check_version(
    engine: str, distributions: Sequence[str], versions: Sequence[str]
) -> Iterator[Finding]:
    """Check the installed version of an engine by its metadata; nothing of it is imported."""
    check = f"{engine}: version"
    for name in distributions:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if any(found == known or found.startswith(f"{known}.") for known in versions):
            yield ok(check, f"{found} ({name})")
        else:
            yield warn(
                check,
                f"{found} ({name}); the bridge is tested with {' and '.join(versions)}",
                f"pip install '{name}=={versions[-1]}', or run `make interop-vllm` with this one",
            )
        return
    yield warn(
        check,
        "not installed in this environment: neither its version nor its start was checked",
        f"run the `hicache` of the environment that {engine} runs in",
    )
