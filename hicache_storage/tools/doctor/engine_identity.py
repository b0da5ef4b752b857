"""Fields of the identity that an engine's command line tells; the engine knows the others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache_storage.tools.doctor import vllm
from hicache_storage.tools.doctor.engine_command import EngineCommand, read_object

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.tools.doctor.finding import DoctorTarget

EXTRA: Final = "--hicache-storage-backend-extra-config"
DTYPES: Final = {"half": "float16", "float": "float32", "bf16": "bfloat16"}
"""Other names of dtypes in engines' options."""
CHANGES_REVISION: Final = (
    *("--weight-version", "--json-model-override-args", "--quantization-param-path"),
)
"""Options of SGLang that its bridge puts into the revision."""
CHANGES_RANKS: Final = ("--enable-dp-attention", "--dcp-size")
"""Options of SGLang with which the ranks of a pool are not `--tp-size`."""


def sglang_options(target: DoctorTarget) -> dict[str, object]:
    """Return the options of SGLang's bridge, as its command line has them; empty without any.

    Raises:
        ValueError: they, or a file that the command line names, are no JSON.
        OSError: the file cannot be read.
    """
    text = EngineCommand.parse(target.command_line).value(EXTRA)
    if text.startswith("@"):
        text = Path(text[1:]).read_text()
    return read_object(text) if text else {}


def identity_fields(target: DoctorTarget, options: Mapping[str, object]) -> dict[str, object]:
    """Return the fields that the command line tells, with the engine's own defaults.

    Args:
        target: engine and command line.
        options: of the bridge.
    """
    command = EngineCommand.parse(target.command_line)
    told = {
        "vllm": lambda: _vllm(command, vllm.connector_options(target)),
        "sglang": lambda: _sglang(command),
        # LMCache's server learns the rest from the engines that it serves.
        "lmcache": lambda: dict[str, object](layout="lmcache"),
    }[target.engine]()
    told |= {name: options.get(name, "") for name in ("tenant", "salt")}
    if not command.given(*CHANGES_REVISION):
        told["revision"] = options.get("revision", "")
    if declared := options.get("kv_dtype"):
        told["kv_dtype"] = declared
    return {name: value for name, value in told.items() if value is not None}


def _vllm(command: EngineCommand, connector: Mapping[str, object]) -> dict[str, object]:
    served = command.arguments[1:2] if command.arguments[:1] == ["serve"] else []
    dtype = _dtype(command, "--kv-cache-dtype") or _dtype(command, "--dtype")
    told: dict[str, object] = {
        "model": command.value("--model", default="".join(served)) or None,
        "kv_dtype": dtype,
    }
    # In the canonical layout sizes share, where the model's attention allows it.
    if not connector.get("canonical_layout"):
        told["tp_size"] = command.number("--tensor-parallel-size", "-tp", default=1)
        told["pp_size"] = command.number("--pipeline-parallel-size", "-pp", default=1)
    return told


def _sglang(command: EngineCommand) -> dict[str, object]:
    told: dict[str, object] = {
        "model": command.value("--served-model-name", "--model-path", "--model") or None,
        "kv_dtype": _dtype(command, "--kv-cache-dtype") or _dtype(command, "--dtype"),
        "layout": command.value("--hicache-mem-layout") or None,
        "page_size": command.number("--page-size", default=0) or None,
        "pp_size": command.number("--pp-size", "--pp", "--pipeline-parallel-size", default=1),
    }
    if not command.given(*CHANGES_RANKS):
        told["tp_size"] = command.number("--tp-size", "--tp", "--tensor-parallel-size", default=1)
    return told


def _dtype(command: EngineCommand, option: str) -> str | None:
    value = command.value(option, default="auto")
    return None if value == "auto" else DTYPES.get(value, value)
