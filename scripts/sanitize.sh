#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The suite under AddressSanitizer + UBSan, then under ThreadSanitizer.
#   scripts/sanitize.sh [--short] [--asan|--tsan]
# --short builds and runs only the programs where a memory or threading fault is likely (listed below): minutes, for CI.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
short=0 presets=()
for argument in "$@"; do
  case $argument in
    --short) short=1 ;;
    --asan) presets+=(asan) ;;
    --tsan) presets+=(tsan) ;;
    *) printf "sanitize: unknown option '%s'\n" "$argument" >&2; exit 2 ;;
  esac
done
[ ${#presets[@]} -gt 0 ] || presets=(asan tsan)
cd "$root"
source scripts/sanitizer_env.sh

# Programs of the short form; without --short the whole suite runs. asan: index arithmetic of the foundations. tsan: everything that
# runs ranks or a pool.
short_asan=(test_core test_route test_ops_gemm test_exchange)
short_tsan=(test_core test_fabric test_exchange)

for preset in "${presets[@]}"; do
  if [ $short = 0 ]; then
    bash scripts/test.sh "--$preset"
    continue
  fi
  cmake --preset "$preset" -DWAYBILL_BUILD_TOOLS=OFF >/dev/null
  list="short_$preset[@]"
  present=()
  for program in "${!list}"; do
    ninja -C "build/$preset" -t query "$program" >/dev/null 2>&1 && present+=("$program")
  done
  printf 'sanitize: %s short form: %s\n' "$preset" "${present[*]}"
  [ ${#present[@]} -gt 0 ] || { echo "sanitize: none of the programs exists" >&2; exit 1; }
  cmake --build "build/$preset" --target "${present[@]}"
  for program in "${present[@]}"; do
    binary=$(find "build/$preset" -type f -name "$program" -perm -u+x | head -n 1)
    "$binary" --gtest_brief=1 --gtest_filter='-*Slow*:*2e31*:*DISABLED*'
  done
done
