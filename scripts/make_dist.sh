#!/usr/bin/env bash
# Builds what is published and tries it: sdist and wheel, the wheel once more from the sdist (the same bytes), the smoke test in a
# clean environment, and a bill of materials of that environment.
# usage: scripts/make_dist.sh VENV OUT      VENV has build and cyclonedx-bom (the extra `release`)
set -euo pipefail
(($# == 2)) || { sed -n 's/^# usage: /usage: /p' "$0" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -f "$out"/hicache_storage-* "$out"/hicache-storage-* "$out"/SHA256SUMS

"$venv/bin/python" -m build --no-isolation --sdist --wheel --outdir "$out" "$root" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
wheel=$(echo "$out"/hicache_storage-*.whl)
mkdir "$work/source" "$work/again"
tar -xzf "$out"/hicache_storage-*.tar.gz -C "$work/source" --strip-components=1
"$venv/bin/python" -m build --no-isolation --wheel --outdir "$work/again" "$work/source" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
cmp "$wheel" "$work/again/$(basename "$wheel")"

version=$(basename "$wheel" | cut -d- -f2)
python3 -m venv "$work/clean"
pip() { "$work/clean/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }
# torch first and pinned: see constraints.txt.
pip -c "$root/constraints.txt" torch
pip -c "$root/constraints.txt" "$wheel[cli,server]"
(cd "$work" && "$work/clean/bin/python" -P "$root/scripts/smoke.py" "$version")

# pip itself is no part of what is installed for hicache-storage.
"$work/clean/bin/python" -m pip --disable-pip-version-check uninstall --quiet --yes setuptools pip >/dev/null 2>&1 || true
"$venv/bin/cyclonedx-py" environment "$work/clean/bin/python" --pyproject "$root/pyproject.toml" --output-reproducible \
  --output-file "$out/hicache-storage-$version.cdx.json"
# The version is not in pyproject.toml, and so not in there.
"$venv/bin/python" - "$out/hicache-storage-$version.cdx.json" "$version" <<'PYTHON'
import json, sys
path, version = sys.argv[1:]
with open(path) as file:
    bill = json.load(file)
bill["metadata"]["component"] |= {"version": version, "purl": f"pkg:pypi/hicache-storage@{version}"}
with open(path, "w") as file:
    json.dump(bill, file, indent=2)
PYTHON
(cd "$out" && sha256sum hicache_storage-* hicache-storage-*.cdx.json >SHA256SUMS && cat SHA256SUMS)
