#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# clang-format on every C++, C and CUDA file of the repository; --fix rewrites them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fix=0
[ "${1:-}" != --fix ] || fix=1
mapfile -t files < <(git ls-files '*.h' '*.cc' '*.c' '*.cu' '*.cuh' 2>/dev/null || find include src tools tests bench bindings -name '*.h' -o -name '*.cc' -o -name '*.c')
[ ${#files[@]} -gt 0 ] || { echo "format: no files" >&2; exit 1; }
command -v clang-format >/dev/null || { echo "format: clang-format is missing (scripts/setup.sh check)" >&2; exit 1; }
# Other versions lay some lines out differently; 14 is that of Debian 12.
version=$(clang-format --version | grep -oE "[0-9]+" | head -n 1)
if [ "$version" != 14 ]; then
  printf "format: not checked, clang-format 14 is needed and %s is installed\n" "$version"
  exit 0
fi
if [ $fix = 1 ]; then
  clang-format -i "${files[@]}"
else
  printf '%s\n' "${files[@]}" | xargs -n 25 -P "$(nproc)" clang-format --dry-run -Werror
fi
printf 'format: %d files\n' "${#files[@]}"
