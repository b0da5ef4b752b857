#!/usr/bin/env bash
# All that needs a CUDA device, in a Python that has torch and pytest, from a bare checkout:
#   scripts/gpu_tests.sh [PYTHON]
# First the tests: of the copies, of the stack over them, and of the example. Then
# benchmarks/device_copies.py, with SGLang's own kernels where SGLANG_TREE names a tree of them.
# Results: results.md and results.json of the benchmark, and tests.md and tests.json, in OUT.
#
# For a machine without a network bring what it lacks as wheels. Where there is a network, for its version of Python:
#   scripts/gpu_tests.sh --fetch DIRECTORY 3.12
# and there:
#   WHEELS=DIRECTORY scripts/gpu_tests.sh [PYTHON]
# PARTS="copies stack example benchmark" are run; what a part lacks is named, and fails. DRY_RUN=1 needs no GPU:
# the tests are collected and skipped, and the benchmark runs on the simulator.
set -uo pipefail
cd "$(dirname "$0")/.."

if [[ "${1:-}" == --fetch ]]; then
  [[ $# == 3 ]] || { echo "usage: scripts/gpu_tests.sh --fetch DIRECTORY PYTHON_VERSION" >&2; exit 2; }
  # The kernel is compiled by NVRTC, which torch for CUDA brings.
  exec python3 -m pip download --only-binary=:all: --python-version "$3" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 -d "$2" \
    msgspec xxhash pluggy hypothesis 'cuda-core>=1.1,<2' 'cuda-bindings>=12.9,<14' numpy
fi

python="${1:-python3}"
out="${OUT:-out/gpu}"
dry="${DRY_RUN:-}"
mkdir -p "$out"
brought="$(mktemp -d -t hicache-wheels.XXXXXX)"
trap 'rm -rf "$brought"' EXIT
export PYTHONPATH="$PWD:$PWD/backends:$PWD/conformance:$PWD/metadata_server${PYTHONPATH:+:$PYTHONPATH}"
# Streams that share a hardware queue wait for each other, and a missing event would not show.
export CUDA_DEVICE_MAX_CONNECTIONS=32
# Which plugins of pytest there are is no matter here.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
failed=0

# Modules of this list that the Python lacks; of wheels, those that bring one.
lacking="$brought/lacking.py"
cat >"$lacking" <<'CODE'
import importlib.util
import sys
import zipfile


def lacks(module):
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


for name in sys.argv[1:]:
    module = name
    if name.endswith(".whl"):
        packages = [each for each in zipfile.ZipFile(name).namelist() if each.endswith("/__init__.py")]
        module = min(packages, key=len, default="-/").rpartition("/")[0].replace("/", ".")
    if lacks(module):
        print(name)
CODE

if [[ -n "${WHEELS:-}" ]]; then
  # Its own versions stay.
  mapfile -t wheels < <("$python" "$lacking" "$WHEELS"/*.whl)
  [[ ${#wheels[@]} == 0 ]] ||
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$brought" "${wheels[@]}" || exit 1
fi
# Drivers are found by entry points, which a checkout on PYTHONPATH has not.
"$python" - "$brought/hicache_storage-0.dist-info" <<'CODE' || exit 1
import sys
import tomllib
from pathlib import Path

home = Path(sys.argv[1])
home.mkdir()
(home / "METADATA").write_text("Metadata-Version: 2.1\nName: hicache-storage\nVersion: 0\n")
groups = tomllib.loads(Path("pyproject.toml").read_text())["project"]["entry-points"]
lines = []
for group, entries in groups.items():
    if group.startswith("hicache_storage."):
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
(home / "entry_points.txt").write_text("\n".join(lines) + "\n")
CODE
PYTHONPATH="$PYTHONPATH:$brought"

has() {
  local name="$1" modules="$2"
  # shellcheck disable=SC2086
  "$python" - "$name" "$dry" $("$python" "$lacking" $modules) <<'CODE'
import sys

name, dry, *missing = sys.argv[1:]
if missing:
    sys.exit(
        f"{name}: {sys.executable} has no {', '.join(missing)}; install them, or bring wheels: "
        f"scripts/gpu_tests.sh --fetch DIRECTORY {sys.version_info.major}.{sys.version_info.minor}, then WHEELS=DIRECTORY"
    )
import torch

if not dry and not torch.cuda.is_available():
    sys.exit(f"{name}: torch {torch.__version__} finds no CUDA device")
CODE
}

wanted() {
  [[ " ${PARTS:-copies stack example benchmark} " == *" $1 "* ]] || return 1
  echo "== $1"
}

part() {
  local name="$1" modules="$2"
  shift 2
  wanted "$name" || return 0
  has "$name" "$modules" || return 1
  "$python" -m pytest -c tests/gpu.ini --rootdir . -p no:cacheprovider -m gpu -q -rfE \
    -o junit_logging=system-out --junit-xml "$out/$name.xml" "$@"
}

part copies "torch pytest numpy cuda.core cuda.bindings" --confcutdir tests/transfer \
  tests/transfer/test_cuda.py tests/transfer/test_stream_rules.py tests/transfer/test_engine.py \
  tests/pools/test_memory.py tests/pools/test_adapter.py || failed=1
part stack "torch pytest numpy pluggy msgspec xxhash cuda.core cuda.bindings" tests/hybrid/test_stack.py || failed=1
part example "torch pytest numpy pluggy msgspec xxhash hypothesis cuda.core cuda.bindings" \
  tests/examples/test_tiny_hybrid_lm.py tests/examples/test_multiturn.py || failed=1
if wanted benchmark; then
  options=(--out "$out")
  [[ -n "$dry" ]] && options+=(--device cpu --cases 3 --mib 1 --layers 2 --rounds 1)
  [[ -n "${SGLANG_TREE:-}" ]] && options+=(--sglang "$SGLANG_TREE")
  { has benchmark "torch msgspec cuda.core cuda.bindings" && "$python" benchmarks/device_copies.py "${options[@]}"; } || failed=1
fi

"$python" - "$out" <<'CODE' || failed=1
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

out, lines, found = Path(sys.argv[1]), ["| part | passed | failed | skipped | seconds |", "|---|---|---|---|---|"], {}
for path in sorted(out.glob("*.xml")):
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    outputs = {c.get("name"): c.findtext("system-out", "").partition("\n")[2].strip() for c in cases}
    printed = {name: text for name, text in outputs.items() if text}
    found[path.stem] = {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": [f"{c.get('classname')}::{c.get('name')}" for c in failed],
        "skipped": len(skipped),
        "seconds": round(sum(float(c.get("time", 0)) for c in cases)),
        "printed": printed,
    }
    row = found[path.stem]
    lines.append(f"| {path.stem} | {row['passed']} | {len(failed)} | {row['skipped']} | {row['seconds']} |")
    lines += [f"\n{text}" for text in (*row["failed"], *printed.values())] + [""]
(out / "tests.md").write_text("\n".join(lines) + "\n")
(out / "tests.json").write_text(json.dumps(found, indent=1))
CODE
exit "$failed"
