#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what a task needs on Debian 12 or Ubuntu 24.04 and says what and why. Does nothing where all is there.
#   scripts/setup.sh [demo|test|check|all]      default: all
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
what=${1:-all}

say() { printf '%s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 2; }

# package|why, one a line. Debian 12 and Ubuntu 24.04 use the same names.
build_packages='g++|C++20 compiler
cmake|build system (3.25 or newer)
ninja-build|build tool the presets use
libfmt-dev|text formatting
nlohmann-json3-dev|JSON files
libspdlog-dev|log lines of the command
libtomlplusplus-dev|TOML configs
libcli11-dev|command line'
demo_packages='bible-kjv|public-domain text to train on (King James)
python3|HTML report
python3-venv|private Python environment for the report'
test_packages='libgtest-dev|test framework
libgmock-dev|test framework
librapidcheck-dev|property tests
libbenchmark-dev|micro-benchmarks
gcc|the C ABI is tested from C11
binutils|symbol check of the shared library
libopenmpi-dev|MPI engine and its tests
openmpi-bin|mpirun of the MPI tests
iproute2|network namespaces of the MPI failure tests
python3|check scripts and report test
python3-venv|private Python environment for the report test
ccache|faster rebuilds'
check_packages='clang-format|formatting check
git|list of files to check'

case $what in
  demo) wanted="$build_packages"$'\n'"$demo_packages" ;;
  test) wanted="$build_packages"$'\n'"$test_packages" ;;
  check) wanted="$check_packages" ;;
  all) wanted="$build_packages"$'\n'"$demo_packages"$'\n'"$test_packages"$'\n'"$check_packages" ;;
  *) die "unknown task '$what' (demo, test, check or all)" ;;
esac

installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null || true)" = installed ]; }

install_packages() {
  command -v dpkg-query >/dev/null || die "this script installs with apt, which this system lacks. Install by hand:
$(say "$wanted" | sort -u | sed 's/|/: /; s/^/  /')"
  local missing=() name why
  while IFS='|' read -r name why; do
    if ! installed "$name"; then
      say "needs $name: $why"
      missing+=("$name")
    fi
  done < <(say "$wanted" | sort -u)
  [ ${#missing[@]} -gt 0 ] || return 0
  local sudo=()
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "not root and sudo is missing; as root run: apt-get install ${missing[*]}"
    sudo=(sudo)
    say "not root: apt-get runs under sudo"
  fi
  say "installing ${#missing[@]} packages with apt-get"
  local log
  log=$(mktemp)
  if ! { "${sudo[@]}" apt-get update -qq && "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    rm -f "$log"
    die "apt-get could not install: ${missing[*]}. Without a network, install these by hand and run this again."
  fi
  rm -f "$log"
}

# The report's Python packages live in .venv, never in the system's Python.
install_python() {
  local venv=$root/.venv requirements=$root/tools/report/requirements.txt stamp
  stamp=$(cksum <"$requirements")
  if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.waybill-stamp" 2>/dev/null || true)" = "$stamp" ] && "$venv/bin/python" -c 'import plotly' 2>/dev/null; then
    return 0
  fi
  say "needs plotly (in $venv): plots of the HTML report"
  # The distribution's Python has ensurepip once python3-venv is there; another python3 on PATH may not.
  local python=/usr/bin/python3
  [ -x "$python" ] || python=python3
  local log
  log=$(mktemp)
  if ! { "$python" -m venv --clear "$venv" && "$venv/bin/python" -m pip install -q --disable-pip-version-check -r "$requirements"; } >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    rm -f "$log"
    say "setup: pip could not install the report's packages; training works without them, the HTML report does not" >&2
    return 0
  fi
  rm -f "$log"
  say "$stamp" >"$venv/.waybill-stamp"
}

install_packages
case $what in demo | test | all) install_python ;; esac
