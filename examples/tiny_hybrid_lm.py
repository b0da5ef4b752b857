"""A tiny language model that chats over three tiers of cache, and proves at every turn that nothing
changed its mind.

Ten clients talk to a model in plain torch, whose KV and recurrent states lie in the device pools of
a cache stack (`hicache_storage.hybrid`). A loop serves several requests together: a prefix is
matched by the radix cache, loaded from the host or fetched from a storage, and what is computed is
written through to both. Memory runs short between rounds, so that prefixes come from the device
(L1), the host (L2) and the storage (L3). After each turn all its logits are compared with those of
a full recomputation in other memory: bit by bit; in bfloat16, where `mamba` uses torch's own
kernels, within 3 % of the largest logit.

    python examples/tiny_hybrid_lm.py [--model mamba|dsa] [--storage DRIVER] [-c KEY=VALUE]
    [--restart] [--corrupt]

`--restart` goes on in a second process over the same store, `--corrupt` damages one stored page of
the file driver before the last round: hits become fewer, and logits stay.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tiny_hybrid_lm_parts import places
from tiny_hybrid_lm_parts.chat import Conversation, Talk, empty, play_round, squeeze, totals
from tiny_hybrid_lm_parts.mamba import mamba_model
from tiny_hybrid_lm_parts.requests import Tier
from tiny_hybrid_lm_parts.server import Server
from tiny_hybrid_lm_parts.sizes import Sizes
from tiny_hybrid_lm_parts.sparse import sparse_model

from hicache_storage import create_storage
from hicache_storage.hybrid import build_hybrid_stack

if TYPE_CHECKING:
    from collections.abc import Mapping

    Store = Mapping[str, object]
    """Options of the driver, with the place of the store."""

MODELS = {"mamba": mamba_model, "dsa": sparse_model}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Arguments of the command line."""

    model: str = "mamba"
    storage: str = "file"
    given: dict[str, str] = field(default_factory=dict[str, str])
    """Options of the driver."""
    dtype: str = "float32"
    device: str = "cpu"
    talk: Talk = field(default_factory=Talk)
    restart: bool = False
    corrupt: bool = False
    resume: Path | None = None
    """What a first process has left: its sessions."""


class ExampleFailedError(Exception):
    """The cache did not do what it is for."""


def run(options: Options, store: Store, conversation: Conversation) -> None:
    """Play rounds over a stack of their own, and compare all turns."""
    talk, last = options.talk, conversation.rounds + options.talk.rounds
    model = MODELS[options.model](_sizes(options, last))
    identity = model.config.identity(f"examples/tiny-hybrid-lm/{options.model}")
    with build_hybrid_stack(model.config) as stack:
        stack.attach(create_storage(options.storage, identity, store))
        server = Server(model.forward, stack, running=talk.running)
        play_round(talk, conversation, server, model)
        while conversation.rounds < last:
            squeeze(server)
            if options.corrupt and conversation.rounds == last - 1:
                empty(server)
                print(
                    f"flipped a bit in "
                    f"{places.flip_a_bit(Path(str(store['path'])), talk.seed).name}"
                )
            play_round(talk, conversation, server, model)


def _sizes(options: Options, rounds: int) -> Sizes:
    """Room for all sessions on the device and the host; what makes it short is `squeeze`."""
    page = Sizes.page
    tokens = (options.talk.clients + options.talk.running) * options.talk.longest(rounds, page)
    states = options.talk.clients * rounds * 2 + options.talk.running * 3
    return Sizes(
        device_tokens=tokens,
        host_tokens=tokens,
        device_states=states,
        host_states=states,
        dtype=DTYPES[options.dtype],
        device=options.device,
        seed=options.talk.seed,
    )


def report(options: Options, conversation: Conversation, title: str) -> None:
    """Print what came from where; raises where a logit differs."""
    print(
        f"{title}: {options.model}, {options.dtype} on {options.device}, storage {options.storage}"
    )
    print(f"{'tier':>6} {'turns':>6} {'tokens restored':>16} {'equal':>6}")
    for tier in Tier:
        turns, tokens, equal = totals(conversation.of_tier(tier))
        print(f"{tier:>6} {turns:6} {tokens:16} {equal:6}")
    turns, tokens, equal = totals(conversation.turns)
    restorable = sum(turn.restorable for turn in conversation.turns)
    print(
        f"{'all':>6} {turns:6} {tokens:16} {equal:6}   of {restorable} tokens that could be "
        f"restored"
    )
    worst = max(turn.difference for turn in conversation.turns)
    print(f"largest difference of a logit: {worst}")
    if equal != turns:
        raise ExampleFailedError(
            f"{turns - equal} turns have other logits than their recomputation"
        )


def check_tiers(conversation: Conversation, tiers: list[Tier]) -> None:
    """Refuse a run that has not used a tier."""
    unused = [tier for tier in tiers if not conversation.of_tier(tier)]
    if unused:
        raise ExampleFailedError(f"nothing was restored from {', '.join(unused)}")


def check_loss(conversation: Conversation) -> None:
    """Refuse a last round in which the damaged page was not missed, or nothing else came back."""
    turns = [turn for turn in conversation.turns if turn.round == conversation.rounds]
    short = [turn for turn in turns if turn.restored.tokens < turn.restorable]
    print(f"the damaged page: {len(short)} of {len(turns)} turns restored less than was stored")
    if not 0 < len(short) < len(turns):
        raise ExampleFailedError(
            "a damaged page must be a miss for those who need it, and for nobody else"
        )


def restart(options: Options, store: Store, conversation: Conversation, folder: Path) -> int:
    """Go on in a second process; its exit status."""
    left = folder / "sessions.json"
    left.write_text(json.dumps({"sessions": conversation.sessions, "rounds": conversation.rounds}))
    command = [sys.executable, __file__, "--resume", str(left), "--rounds", "1"]
    for name in ("model", "storage", "dtype", "device"):
        command += [f"--{name}", str(getattr(options, name))]
    for name in ("clients", "running", "seed"):
        command += [f"--{name}", str(getattr(options.talk, name))]
    for name, value in store.items():
        command += ["-c", f"{name}={value}"]
    return subprocess.run(command, check=False).returncode


def main() -> int:
    options = _options()
    # Of small tensors, more threads only make it slower.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tiny-hybrid-lm-") as folder:
        store = places.store(options.storage, options.given, Path(folder))
        try:
            return play(options, store, Path(folder))
        except ExampleFailedError as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1


def play(options: Options, store: Store, folder: Path) -> int:
    """The conversation with all its checks; the exit status."""
    conversation = Conversation([[] for _ in range(options.talk.clients)])
    if options.resume:
        left = json.loads(options.resume.read_text())
        conversation = Conversation(left["sessions"], left["rounds"])
    run(options, store, conversation)
    report(options, conversation, "in a second process" if options.resume else "turns")
    check_tiers(conversation, [Tier.L3] if options.resume else [Tier.L1, Tier.L2, Tier.L3])
    if options.corrupt:
        check_loss(conversation)
    return restart(options, store, conversation, folder) if options.restart else 0


def _options() -> Options:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="mamba", help="what kind of model")
    parser.add_argument("--storage", default="file", help="driver of the third tier")
    parser.add_argument(
        "-c",
        dest="given",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the driver",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="default float32 on the CPU, bfloat16 elsewhere"
    )
    for name in ("clients", "rounds", "running", "seed"):
        parser.add_argument(
            f"--{name}",
            type=int,
            default=getattr(Talk, name),
            help=f"default {getattr(Talk, name)}",
        )
    parser.add_argument(
        "--restart", action="store_true", help="go on in a second process over the same store"
    )
    parser.add_argument(
        "--corrupt",
        action="store_true",
        help="damage a stored page before the last round; file driver only",
    )
    parser.add_argument("--resume", type=Path, help=argparse.SUPPRESS)
    found = parser.parse_args()
    if found.corrupt and found.storage != "file":
        parser.error("--corrupt knows the files of --storage file only")
    if found.rounds < 1 or (found.rounds < 3 and not found.resume):
        parser.error("--rounds must be at least 3, for every tier to be used")
    given = dict(text.partition("=")[::2] for text in found.given)
    return Options(
        model=found.model,
        storage=found.storage,
        given=given,
        device=found.device,
        dtype=found.dtype or ("float32" if found.device == "cpu" else "bfloat16"),
        talk=Talk(
            clients=found.clients, rounds=found.rounds, running=found.running, seed=found.seed
        ),
        restart=found.restart,
        corrupt=found.corrupt,
        resume=found.resume,
    )


if __name__ == "__main__":
    sys.exit(main())
