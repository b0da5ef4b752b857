#!/usr/bin/env bash
# Runs this project's drivers and those of SGLang, vLLM and LMCache through the suite, and writes docs/matrix.md from what came of it.
# Needs the environments that scripts/make_sglang_env.sh and scripts/make_vllm_env.sh build. About six minutes on two cores.
#
# usage: scripts/make_matrix.sh SGLANG_ENV VLLM_ENV RESULTS OUTPUT [DRIVER...]
set -euo pipefail

(( $# >= 4 )) || { sed -n 's/^# usage: /usage: /p' "$0" >&2; exit 2; }
sglang=$1/bin/hicache vllm=$2/bin/hicache results=$3 output=$4
shift 4
# Fixed, so that the document changes when a driver or the suite does.
common=(--seed 1 --run-id matrix)
# Workers import their engine within a case, which takes long where several runs do.
foreign=(--level core,pools,identity,faults --case-seconds 150)
# What is wrong with these is ours to repair, and a reason to fail.
ours=(file hf3fs mooncake sglang-bridge vllm-bridge lmcache-bridge)
theirs=(sglang-file sglang-hf3fs sglang-mooncake sglang-nixl sglang-sim peercache vllm-fs lmcache-fs lmcache-fs-native)
drivers=("$@")
(( $# )) || drivers=("${ours[@]}" "${theirs[@]}")

judge() {
  local driver=$1 status=0 hicache=$sglang options=("${common[@]}" --profile smoke)
  case $driver in
    # `make test` has the short profile.
    file) options=("${common[@]}" --profile default) ;;
    sglang-* | peercache) options+=("${foreign[@]}" --interface sglang) ;;
    vllm-*) options+=("${foreign[@]}" --interface vllm-tier) hicache=$vllm ;;
    lmcache-*) options+=("${foreign[@]}" --interface lmcache-l2) hicache=$vllm ;;
  esac
  "$hicache" conformance run "$driver" "${options[@]}" --report "$results/$driver" >"$results/$driver.log" 2>&1 || status=$?
  # A foreign driver that breaks rules is what the document is about; a run that could not be is not.
  if (( status > 1 )) || [[ $status != 0 && " ${ours[*]} " == *" $driver "* ]]; then
    cat "$results/$driver.log" >&2
    echo "make_matrix: the run of $driver ended with $status" >&2
    return 1
  fi
}

rm -rf "$results"
mkdir -p "$results"
# Four at a time on two cores, because they spend half of it waiting. The longest is the first of them.
failed=0 running=0
first=()
[[ " ${drivers[*]} " != *" peercache "* ]] || first=(peercache)
for driver in "${first[@]}" "${drivers[@]/peercache/}"; do
  [[ -n $driver ]] || continue
  if ((running == 4)); then
    wait -n || failed=1
    running=3
  fi
  judge "$driver" &
  running=$((running + 1))
done
for ((; running > 0; running--)); do wait -n || failed=1; done
((failed == 0))
"${sglang%hicache}python" "${0%/*}/matrix.py" "$output" "${drivers[@]/#/$results/}"
echo "$output: ${#drivers[@]} drivers"
