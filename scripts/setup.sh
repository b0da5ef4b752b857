#!/usr/bin/env bash
# Makes an environment on a fresh Debian or Ubuntu machine: what apt has to bring, a virtual environment, this project
# with an extra: `cli` is enough for the demo, `dev` brings the development tools. usage: scripts/setup.sh DIR [EXTRA]
set -euo pipefail
dir=${1:?usage: scripts/setup.sh DIR [EXTRA]}
extra=${2:-dev}

# openssl: the tests make certificates with it.
# fuse3: the tests count requests on a file system of their own. python3-venv: some images leave it out.
# chromium: the tests click through the status page (380 MB; apt-get took 10 s for it); fonts-dejavu-core: without a font it draws no text.
# libatomic1: the Node.js that pyright brings along links to it. libibverbs1, libcurl4, libnuma1: Mooncake does, with RDMA or without.
# promtool, of the package prometheus: the tests try the alert rules with it. The package and what it depends on are 340 MB, most of it
# time zones for the pages of a server that nobody starts; so the one program of 48 MB is taken out of it, into the environment.
# redis-server: several metadata servers share one. systemd: its systemd-analyze reads the unit; nothing of it runs.
packages=()
promtool=none
python3 -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3-venv)
if [[ $extra == dev ]]; then
  command -v fusermount3 >/dev/null || packages+=(fuse3)
  ldconfig -p | grep -q libfuse3 || packages+=(libfuse3-dev)
  ldconfig -p | grep -q libatomic || packages+=(libatomic1)
  for library in libibverbs.so.1:libibverbs1 libcurl.so.4:libcurl4 libnuma.so.1:libnuma1; do
    ldconfig -p | grep -q "${library%%:*}" || packages+=("${library##*:}")
  done
  command -v openssl >/dev/null || packages+=(openssl)
  command -v chromium >/dev/null || packages+=(chromium)
  command -v chromedriver >/dev/null || packages+=(chromium-driver)
  [[ -d /usr/share/fonts/truetype/dejavu ]] || packages+=(fonts-dejavu-core)
  command -v redis-server >/dev/null || packages+=(redis-server)
  command -v systemd-analyze >/dev/null || packages+=(systemd)
  promtool=$(command -v promtool || true)
  [[ ! -x $dir/bin/promtool ]] || promtool=$dir/bin/promtool
fi
if ((${#packages[@]})) || [[ -z $promtool ]]; then
  as_root=()
  ((EUID == 0)) || as_root=(sudo)
  # The tests start Redis servers of their own; Debian's package would leave one running.
  policy=/usr/sbin/policy-rc.d
  if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee $policy >/dev/null
    "${as_root[@]}" chmod +x $policy
    trap '"${as_root[@]}" rm -f $policy' EXIT
  fi
  echo "installing Debian packages:" "${packages[@]}" $([[ -n $promtool ]] || echo promtool)
  "${as_root[@]}" apt-get update -qq
  ((${#packages[@]} == 0)) ||
    DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
fi

if [[ ! -x $dir/bin/python ]]; then
  echo "making a virtual environment in $dir"
  python3 -m venv "$dir"
fi
if [[ -z $promtool ]]; then
  mkdir -p "$dir/prometheus"
  (cd "$dir/prometheus" && apt-get download -qq -o APT::Sandbox::User=root prometheus && dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool)
  mv "$dir/prometheus/usr/bin/promtool" "$dir/bin/promtool"
  rm -r "$dir/prometheus"
fi
pip() {
  echo "installing ${*: -1} into $dir"
  "$dir/bin/python" -m pip --disable-pip-version-check install --quiet "$@"
}
# torch first and pinned: a plain range would fetch gigabytes of CUDA packages that no test uses.
pip -c constraints.txt torch
pip -c constraints.txt -e ".[$extra]"
