"""Registers the controls, and says which rule finds each of them out."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_storage.hookspecs import DriverSpec, hookimpl
from hicache_storage.spec import Capabilities, Durability, Sharing


@dataclass(frozen=True, kw_only=True)
class Control:
    """A driver, and what the suite has to say about it."""

    breaks: tuple[str, ...] = ()
    """Rules that must be reported as failed; empty for a right driver."""
    told: str = ""
    """Part of what one of the messages must say."""
    needs_path: bool = False


PATH = {"path": "{tmp}/store"}

CONTROLS = {
    "Plain": Control(),
    "Objects": Control(),
    "PromisesNothing": Control(),
    "PromisesTooLittle": Control(),
    "Misses": Control(breaks=("SET-1",), told="page 0 key"),
    "AlwaysTrue": Control(breaks=("GET-1", "EX-2"), told="was not written"),
    "Refuses": Control(breaks=("SET-1",), told="was refused"),
    "Raises": Control(breaks=("GET-1", "SET-7"), told="batch_get_v2 raised OSError: the disk is gone"),
    "ShortAnswers": Control(breaks=("GET-3",), told="keys were answered with"),
    "SwappedKeys": Control(breaks=("GET-1",), told="holds bytes of key"),
    "CompactsHoles": Control(breaks=("GET-1",), told="page 1 key"),
    "DropsLastPage": Control(breaks=("SET-1",), told="was stored (True), and a get answers False"),
    "TruncatesPages": Control(breaks=("GET-1",), told="was not written at byte 48"),
    "LosesV": Control(breaks=("GET-1",), told="was not written at byte 96"),
    "OverrunsPages": Control(breaks=("GET-2",), told="touched page"),
    "KeepsHostPages": Control(breaks=("SET-7",), told="what its writer put into the host page after the set had returned"),
    "Rewrites": Control(breaks=("SET-3",), told="a set wrote it anew"),
    "SharesAScratchBuffer": Control(breaks=("CC-1",), told="holds bytes of key"),
    "IgnoresIdentity": Control(breaks=("ID-1", "ID-3", "ID-4", "LC-4"), told="holds bytes written under"),
    "IgnoresDtype": Control(breaks=("ID-1",), told="kv_dtype 'bfloat16' (expected 'float16')"),
    "IgnoresGeometry": Control(breaks=("ID-1",), told="was set from a pool of another geometry"),
    "IgnoresPools": Control(breaks=("GET-1",), told="holds bytes of pool"),
    "IgnoresCase": Control(breaks=("ID-5",), told="holds bytes of key"),
    "PastesKeys": Control(breaks=("ID-5",), told="holds bytes of key"),
    "WritesByPath": Control(breaks=("ID-5",), told="wrote outside the store", needs_path=True),
    "EveryRankWrites": Control(breaks=("ID-3",), told="rank 1 is not the writer"),
    "OneStateForAllRanks": Control(breaks=("ID-3",), told="tp_rank"),
    "SetLooksElsewhere": Control(breaks=("ID-5", "ID-6"), told="looks elsewhere"),
    "MinimumOfMaxima": Control(breaks=("EX-1",), told="must be"),
    "TrailingAsAll": Control(breaks=("EX-3",), told="(trailing_pages 1): kv_hit_pages is"),
    "GroupsDecide": Control(breaks=("EX-4",), told="(block_groups"),
    "NoList": Control(breaks=("EX-5",), told="restorable_prefix_pages is"),
    "OmitsPools": Control(breaks=("EX-6",), told="is None, must be 0"),
    "CountsGapsAway": Control(breaks=("EX-2",), told="kv .x: kv_hit_pages is 1, must be 0"),
    "RaisesOnUnknownPools": Control(breaks=("EX-7",), told="raised KeyError"),
    "FailsWithoutKeys": Control(breaks=("EX-8",), told="no keys"),
    "ConnectsAtOnce": Control(breaks=("LC-1",), told="connects (socket.connect)"),
    "WritesAtOnce": Control(breaks=("LC-1",), told="wrote into its directory", needs_path=True),
    "LeavesAThread": Control(breaks=("LC-2",), told="thread 'left-behind'"),
    "LeavesADescriptor": Control(breaks=("LC-2",), told="/dev/null"),
    "KeepsPools": Control(breaks=("LC-2",), told="still holds its host pool"),
    "WorksWhenClosed": Control(breaks=("LC-2",), told="after close() raised nothing"),
    "InstallsAHandler": Control(breaks=("LC-3",), told="signal handlers"),
    "NeedsTheMainThread": Control(breaks=("LC-3",), told="main thread"),
    "Exits": Control(breaks=("LC-3",), told="tried to end the process"),
    "ConfiguresLogging": Control(breaks=("LC-3",), told="the root logger's level"),
    "ForgetsForks": Control(breaks=("LC-5",), told="got RuntimeError: bad file descriptor"),
    "ClearsEverything": Control(breaks=("LC-4",), told="another's clear removed it"),
    "ClearsStrangersFiles": Control(breaks=("LC-4",), told="a file of somebody else", needs_path=True),
    "SwallowsMisuse": Control(breaks=("FT-2",), told="raised nothing"),
    "ForeignErrors": Control(breaks=("FT-2",), told="raised KeyError, which is no HiCacheError"),
    "WritesBeforeItChecks": Control(breaks=("FT-2",), told="before it raised"),
    "LogsMisses": Control(breaks=("GET-6",), told="logged WARNING"),
    "CountsTwice": Control(breaks=("OB-1",), told="get_stats raised"),
    "PromisesTooMuch": Control(breaks=("ID-2", "SET-1"), told="page 0 key"),
    "TrustsBytes": Control(breaks=("GET-5",), told="is damaged (flipped bit), and a get delivers it"),
    "KeepsDamage": Control(breaks=("SET-3",), told="is damaged"),
}
"""By class name. The drivers of the command-line tests (`Dies`, `Hangs`, `CannotOpen`) are registered beside them."""

_NOTHING = Capabilities(may_hang=False)
_ALL = Capabilities(sharing=Sharing.PROCESS, durability=Durability.REOPEN, deletes=True, clears=True, may_hang=False)


@hookimpl
def hicache_register_drivers() -> list[DriverSpec]:
    """Offer every control under its class name."""
    return [_spec(name, CONTROLS.get(name, Control())) for name in (*CONTROLS, "Dies", "Hangs", "CannotOpen")]


def _spec(name: str, control: Control) -> DriverSpec:
    return DriverSpec(
        name=name,
        target=f"control_drivers:{name}",
        config="control_drivers:FileControlConfig" if control.needs_path else "control_plain:PlainConfig",
        capabilities=_NOTHING if name in ("PromisesNothing", "PromisesTooLittle") else _ALL,
        trial_config=PATH if control.needs_path else {},
    )
