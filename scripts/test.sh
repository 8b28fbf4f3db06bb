#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs, builds and runs the whole test suite with ctest.
#   scripts/test.sh [--asan|--tsan] [--quick] [--filter REGEX]
# --asan AddressSanitizer + UBSan, --tsan ThreadSanitizer (own build folders); --quick leaves out the tests labelled slow;
# --filter runs the tests whose names match.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
preset=cpu arguments=() install=1
while [ $# -gt 0 ]; do
  case $1 in
    --asan) preset=asan; shift ;;
    --tsan) preset=tsan; shift ;;
    --quick) arguments+=(-LE slow); shift ;;
    --filter) [ $# -gt 1 ] || { echo 'test: --filter needs a regular expression' >&2; exit 2; }; arguments+=(-R "$2"); shift 2 ;;
    --no-install) install=0; shift ;;
    -h | --help) sed -n '3,6s/^# *//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) printf "test: unknown option '%s'\n" "$1" >&2; exit 2 ;;
  esac
done
cd "$root"
[ $install = 0 ] || bash scripts/setup.sh test
source scripts/sanitizer_env.sh

log=$(mktemp)
trap 'rm -f "$log"' EXIT
cmake --preset "$preset" >"$log" 2>&1 || { cat "$log" >&2; echo "test: configuration of preset $preset failed" >&2; exit 1; }
cmake --build "build/$preset"
# A fault must fail the run, and a run without a test is a fault too.
ctest --test-dir "build/$preset" --no-tests=error --output-on-failure -j "$(nproc)" "${arguments[@]}"
