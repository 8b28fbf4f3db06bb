#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the GPU programs here and packs them for a machine that has a GPU and none of the build's packages (x86-64, glibc and libstdc++ not older).
#   scripts/gpu_pack.sh ARCHIVE.tar.xz [BUILD_FOLDER]      default folder: build/gpu (configured where it is not there)
# There, in a checkout of the same commit:
#   mkdir /tmp/gpu && tar xJf ARCHIVE.tar.xz -C /tmp/gpu
#   WAYBILL_COMMIT=$(cat /tmp/gpu/commit) WAYBILL_LIBRARY=/tmp/gpu/lib/libwaybill.so WAYBILL_JAX_LIBRARY=/tmp/gpu/lib/libwaybill_jax.so \
#     LD_LIBRARY_PATH=/tmp/gpu/lib scripts/gpu-check.sh --bin /tmp/gpu/bin
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -ge 1 ] || { sed -n '3,8s/^# *//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
archive=$1
build=${2:-build/gpu}
[ -z "$(git status --porcelain)" ] || echo "gpu_pack: the tree has changes that are in no commit" >&2
[ -f "$build/CMakeCache.txt" ] || cmake --preset cuda -B "$build" -DWAYBILL_CUDA=ON
cmake "$build" >/dev/null
mapfile -t targets < <(ninja -C "$build" -t targets all | sed -n -E 's/^((test|bench)_cuda_[a-z0-9_]*|other_nccl): phony$/\1/p')
cmake --build "$build" --target "${targets[@]}" waybill waybill_shared waybill_torch waybill_jax_if_found waybill_clock
pack=$(mktemp -d)
trap 'rm -rf "$pack"' EXIT
mkdir "$pack/bin" "$pack/lib"
cp "$build"/gpu_bin/* "$build/tools/waybill/waybill" "$pack/bin/"
cp -L "$build/src/capi/libwaybill.so" "$pack/lib/"
ln -s libwaybill.so "$pack/lib/$(basename "$(readlink "$build/src/capi/libwaybill.so")")"
[ ! -f "$build/bindings/jax/libwaybill_jax.so" ] || cp "$build/bindings/jax/libwaybill_jax.so" "$pack/lib/"
cp "$build/bindings/torch/libwaybill_torch.so" "$build/bench/peers/clock/libwaybill_clock.so" "$pack/lib/"  # found beside libwaybill.so
# What the programs load besides the system's own.
find "$pack/bin" "$pack/lib" -type f -exec ldd {} + 2>/dev/null | awk '$3 ~ /^\// {print $3}' | sort -u |
  grep -v -E '/(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|libcuda|libwaybill)\.so' | xargs -r cp -L -t "$pack/lib"
find "$pack/bin" "$pack/lib" -type f -exec strip --strip-unneeded {} +
git rev-parse HEAD >"$pack/commit"
# One long window: the programs share most of their kernels.
tar c -C "$pack" . | xz -2 --lzma2=preset=2,dict=256MiB >"$archive"
printf 'gpu_pack: %d programs of %s in %s (%d MiB)\n' "$(ls "$pack/bin" | wc -l)" "$(cut -c1-12 "$pack/commit")" "$archive" $(($(stat -c %s "$archive") >> 20))
