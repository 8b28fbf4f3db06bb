#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles every CUDA target with the cuda preset; no GPU is needed to compile. The host code of tests is not optimised here: they are not run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
cmake --preset cuda -DWAYBILL_BUILD_BENCH=OFF -DWAYBILL_CUDA_COMPILE_ONLY=ON >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
# The libraries with device code only: the host tests are the cpu preset's.
mapfile -t targets < <(ninja -C build/cuda -t targets all | sed -n 's/^\(waybill_[a-z_]*cuda[a-z_]*\|test_cuda_[a-z_]*\): phony$/\1/p')
[ ${#targets[@]} -gt 0 ] || { echo "build_cuda: no CUDA target in this tree"; exit 0; }
cmake --build build/cuda --target "${targets[@]}"
printf 'cuda: compiled %s\n' "${targets[*]}"
