#!/usr/bin/env bash
# Runs this project's drivers and SGLang's own through the suite, and writes docs/matrix.md from what came of it. Needs the
# environment that scripts/make_sglang_env.sh builds. About four minutes on two cores.
#
# usage: scripts/make_matrix.sh ENV RESULTS OUTPUT [DRIVER...]
set -euo pipefail

(( $# >= 3 )) || { sed -n 's/^# usage: /usage: /p' "$0" >&2; exit 2; }
hicache=$1/bin/hicache results=$2 output=$3
shift 3
# Fixed, so that the document changes when a driver or the suite does.
common=(--seed 1 --run-id matrix)
foreign=(--interface sglang --level core,pools,identity,faults --case-seconds 60)
# What is wrong with these is ours to repair, and a reason to fail.
ours=(file hf3fs mooncake sglang-bridge)
drivers=("$@")
(( $# )) || drivers=("${ours[@]}" sglang-file sglang-hf3fs sglang-mooncake sglang-nixl sglang-sim peercache)

judge() {
  local driver=$1 status=0 options=("${common[@]}" --profile smoke)
  # The one run of the whole suite in CI; `make test` has the short profile.
  [[ $driver == file ]] && options=("${common[@]}" --profile default)
  [[ $driver == sglang-* || $driver == peercache ]] && options+=("${foreign[@]}")
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
"$hicache" conformance matrix "${drivers[@]/#/$results/}" --output "$output"
echo "$output: ${#drivers[@]} drivers"
