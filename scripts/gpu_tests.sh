#!/usr/bin/env bash
# The tests that need a CUDA device, in a Python that has torch and pytest: `scripts/gpu_tests.sh [PYTHON]`. Nothing is installed.
# First the copies, which need nothing more; then the stack over them and the example. What a part lacks is named, and fails.
set -uo pipefail
cd "$(dirname "$0")/.."
python="${1:-python3}"
export PYTHONPATH=".:backends:conformance:metadata_server${PYTHONPATH:+:$PYTHONPATH}"
# Streams that share a hardware queue wait for each other, and a missing event would not show.
export CUDA_DEVICE_MAX_CONNECTIONS=32
failed=0

part() {
  local name="$1" modules="$2"
  shift 2
  echo "== $name"
  # shellcheck disable=SC2086
  "$python" - "$name" $modules <<'CODE' || return 1
import importlib.util
import sys

name, *modules = sys.argv[1:]
missing = [module for module in modules if importlib.util.find_spec(module) is None]
if missing:
    sys.exit(f"{name}: {sys.executable} has no {', '.join(missing)}; install them, or pass another Python")
import torch

if not torch.cuda.is_available():
    sys.exit(f"{name}: torch {torch.__version__} finds no CUDA device")
CODE
  "$python" -m pytest -c tests/gpu.ini --rootdir . -p no:cacheprovider -m gpu "$@"
}

part copies "torch pytest" --confcutdir tests/transfer \
  tests/transfer/test_cuda.py tests/transfer/test_stream_rules.py tests/transfer/test_hybrid.py \
  tests/pools/test_memory.py tests/pools/test_adapter.py || failed=1
part stack "torch pytest pluggy msgspec xxhash" tests/hybrid/test_stack.py || failed=1
part example "torch pytest pluggy msgspec xxhash hypothesis" tests/examples/test_tiny_hybrid_lm.py || failed=1
exit "$failed"
