# Sourced by the scripts that build environments of engines. They set `python`, `env_dir` and `root` first.

for_tests=(pytest pytest-asyncio pytest-timeout pytest-xdist mfusepy)
# What wheels expect of the machine, each with the Debian package that has it. Mooncake's client and server are linked to the first
# three, whether or not there is RDMA; the suite's disks are FUSE.
libraries=(libibverbs.so.1:libibverbs1 libcurl.so.4:libcurl4 libnuma.so.1:libnuma1 libfuse3.so:libfuse3-dev)
programs=(fusermount3:fuse3)

script=$(basename "$0" .sh)
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# pip complains on stderr about requirements that an engine has and does not get; what it says matters only when it fails.
install() {
  if ! "$python" -m pip install --disable-pip-version-check --no-input --constraint "$root/constraints.txt" "$@" >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    echo "$script: pip install $* failed" >&2
    exit 1
  fi
}

install_system_packages() {
  local entry known packages=()
  known=$(PATH=$PATH:/usr/sbin:/sbin ldconfig -p)
  for entry in "${libraries[@]}"; do
    [[ $known == *"${entry%%:*}"* ]] || packages+=("${entry##*:}")
  done
  for entry in "${programs[@]}"; do
    command -v "${entry%%:*}" >/dev/null || packages+=("${entry##*:}")
  done
  ((${#packages[@]})) || return 0
  if ! command -v apt-get >/dev/null; then
    echo "$script: there is no apt-get here; install what these Debian packages hold: ${packages[*]}" >&2
    exit 1
  fi
  local as_root=()
  ((EUID == 0)) || as_root=(sudo)
  if ! { "${as_root[@]}" apt-get update -qq &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "$script: apt-get install ${packages[*]} failed" >&2
    exit 1
  fi
}

digest() { cat "$@" | sha256sum | cut -d' ' -f1; }

# A file in the environment remembers what a step was made from; a step is repeated only when that has changed.
is_done() { [[ -x $python && -f $env_dir/.hicache-$1 && $(<"$env_dir/.hicache-$1") == "$2" ]]; }
mark_done() { printf '%s\n' "$2" >"$env_dir/.hicache-$1"; }

find_interpreter() {
  local candidate
  for candidate in python3.11 python3.12 python3; do
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "$script: needs Python 3.11 or newer with the venv and ensurepip modules" >&2
  exit 1
}

# torch comes first and alone: whatever follows has to make do with the torch that the project tests with.
begin_environment() {
  rm -f "$env_dir/.hicache-peer" "$env_dir/.hicache-project"
  [[ -x $python ]] || "$(find_interpreter)" -m venv "$env_dir"
  install torch
}

# Entry points and the packages' places are read at installation, so a changed pyproject.toml is installed again.
install_project() {
  local project
  project=$(digest "$root/pyproject.toml")
  if ! is_done project "$project"; then
    install --editable "$root[conformance,metrics,mooncake,server]"
    "$python" -c 'import hicache_conformance, hicache_storage'
    mark_done project "$project"
  fi
}
