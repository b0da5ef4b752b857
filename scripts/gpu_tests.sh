#!/usr/bin/env bash
# The tests that need a CUDA device, in a Python that has torch and pytest: `scripts/gpu_tests.sh [PYTHON]`. Nothing is installed
# there. First the copies, which need nothing more; then the stack over them and the example, which need msgspec and others.
#
# For a machine without them, and without a network, bring them as wheels. Where there is a network, for its version of Python:
#   scripts/gpu_tests.sh --fetch DIRECTORY 3.12
# and there:
#   WHEELS=DIRECTORY scripts/gpu_tests.sh [PYTHON]
# PARTS="copies stack example" are run; what a part lacks is named, and fails.
set -uo pipefail
cd "$(dirname "$0")/.."

if [[ "${1:-}" == --fetch ]]; then
  [[ $# == 3 ]] || { echo "usage: scripts/gpu_tests.sh --fetch DIRECTORY PYTHON_VERSION" >&2; exit 2; }
  exec python3 -m pip download --only-binary=:all: --python-version "$3" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d "$2" \
    msgspec xxhash pluggy hypothesis
fi

python="${1:-python3}"
export PYTHONPATH=".:backends:conformance:metadata_server${PYTHONPATH:+:$PYTHONPATH}"
# Streams that share a hardware queue wait for each other, and a missing event would not show.
export CUDA_DEVICE_MAX_CONNECTIONS=32
failed=0

if [[ -n "${WHEELS:-}" ]]; then
  brought="$(mktemp -d -t hicache-wheels.XXXXXX)"
  trap 'rm -rf "$brought"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$brought" "$WHEELS"/*.whl || exit 1
  # Behind what the Python has itself, so that its own versions stay.
  PYTHONPATH="$PYTHONPATH:$brought"
fi

part() {
  local name="$1" modules="$2"
  shift 2
  [[ " ${PARTS:-copies stack example} " == *" $name "* ]] || return 0
  echo "== $name"
  # shellcheck disable=SC2086
  "$python" - "$name" $modules <<'CODE' || return 1
import importlib.util
import sys

name, *modules = sys.argv[1:]
missing = [module for module in modules if importlib.util.find_spec(module) is None]
if missing:
    sys.exit(
        f"{name}: {sys.executable} has no {', '.join(missing)}; install them, or bring wheels: "
        f"scripts/gpu_tests.sh --fetch DIRECTORY {sys.version_info.major}.{sys.version_info.minor}, then WHEELS=DIRECTORY"
    )
import torch

if not torch.cuda.is_available():
    sys.exit(f"{name}: torch {torch.__version__} finds no CUDA device")
CODE
  "$python" -m pytest -c tests/gpu.ini --rootdir . -p no:cacheprovider -m gpu "$@"
}

part copies "torch pytest" --confcutdir tests/transfer \
  tests/transfer/test_cuda.py tests/transfer/test_cuda_queues.py tests/transfer/test_stream_rules.py tests/transfer/test_hybrid.py \
  tests/pools/test_memory.py tests/pools/test_adapter.py || failed=1
part stack "torch pytest pluggy msgspec xxhash" tests/hybrid/test_stack.py || failed=1
part example "torch pytest pluggy msgspec xxhash hypothesis" \
  tests/examples/test_tiny_hybrid_lm.py tests/examples/test_multiturn.py || failed=1
exit "$failed"
