#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the GPU test and benchmark programs with nvcc and g++ alone, for a machine with a GPU but without the build's packages.
#   scripts/gpu_build.sh OUT [program ...]     programs: {test,bench}_cuda_{router,exchange,gemm,fp8,quantize}, bench_cuda_activation, test_cuda_{fabric,moe,model,training}, test_cuda_train_run (needs toml++ and nlohmann-json, not in the default), bench_cuda_moe_phases (default: all)
# WAYBILL_GPU_DEPS: a folder with include/{fmt,gtest,gmock} and lib/{libgtest.a,libgmock.a} (default: the system's).
# WAYBILL_NCCL_INCLUDE: a folder with NCCL's headers, where the compiler does not find them by itself; without them test_cuda_nccl is left out.
# Fails on ptxas spills and C7508/C7510, as the CMake build does (cmake/check_ptxas.py).
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1
shift
deps=${WAYBILL_GPU_DEPS:-}
include="-Iinclude -Isrc -Itests -I. ${deps:+-isystem $deps/include} ${WAYBILL_NCCL_INCLUDE:+-isystem $WAYBILL_NCCL_INCLUDE}"
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
cuda_include=$(dirname "$(dirname "$(readlink -f "$nvcc")")")/include
arch=${WAYBILL_GPU_ARCH:--gencode=arch=compute_90a,code=sm_90a}
cxx_flags="-std=c++20 -O2 -DWAYBILL_CONFIG_DIR=\"$PWD/configs\" -DFMT_HEADER_ONLY=1 -ffp-contract=off -fno-math-errno -pthread $include -isystem $cuda_include"
cu_flags="-std=c++20 -O3 -DFMT_HEADER_ONLY=1 $arch -fmad=false -lineinfo -Xptxas=-v --expt-relaxed-constexpr --extended-lambda -Xcompiler=-ffp-contract=off $include"
found() { ls "$@" 2>/dev/null || true; }
core="src/core/alloc_trace.cc src/core/dtype.cc src/core/error.cc src/core/implementation.cc src/core/log.cc src/core/status.cc src/core/tensor.cc
  src/core/thread_pool.cc src/core/workspace.cc $(ls src/core/cuda/*.cc) tests/cuda/device_random.cu"
router="src/route/route.cc $(ls src/ops/router/*.cc src/ops/router/cuda/*.cc src/ops/router/cuda/*.cu)"
fabric="$(ls src/fabric/*.cc src/fabric/threads/*.cc src/fabric/caller/*.cc) $(found src/fabric/cuda_local/*.cc src/fabric/cuda_local/*.cu)"
exchange="$fabric $(ls src/route/*.cc src/exchange/*.cc src/exchange/cuda/*.cc src/exchange/cuda/*.cu)"
nccl=
echo '#include <nccl_device.h>' | "$nvcc" -std=c++20 -E -x cu $include - >/dev/null 2>&1 && nccl=$(ls src/fabric/nccl/*.cc src/fabric/nccl/*.cu)
loads="src/route/route.cc src/balance/workload.cc"  # bench/loads.h
gemm="$loads $(ls src/ops/activation/*.cc src/ops/activation/cuda/*.cc src/ops/activation/cuda/*.cu src/ops/gemm/*.cc src/ops/gemm/cuda/*.cc src/ops/gemm/cuda/*.cu | grep -v "quantized\|fp8_\|part_offsets\|widened_") tests/cuda/gemm_reference.cc tests/cuda/gemm_reference.cu"
fp8="$(ls src/ops/gemm/cuda/fp8_*.cc src/ops/gemm/cuda/fp8_*.cu) src/ops/gemm/cuda/grouped_launch.cc tests/cuda/fp8_reference.cc tests/cuda/fp8_reference.cu tests/cuda/gemm_reference.cc tests/cuda/gemm_reference.cu"
activation="$(ls src/ops/activation/*.cc src/ops/activation/cuda/*.cc src/ops/activation/cuda/*.cu)"
quantize="$(ls src/ops/quantize/*.cc src/ops/quantize/cuda/*.cc src/ops/quantize/cuda/*.cu)"
layer=$(printf '%s\n' $exchange $router $gemm src/core/phase.cc src/balance/balance.cc src/moe/*.cc src/moe/cuda/*.cc src/moe/cuda/*.cu src/ops/gemm/*.cc src/ops/gemm/cuda/*.cc src/ops/gemm/cuda/*.cu $quantize | grep -v tests/ | sort -u)
model="$(ls src/ops/model/*.cc src/ops/optimizer/*.cc src/ops/model/cuda/*.cu src/ops/optimizer/cuda/*.cu src/ops/gemm/*.cc src/ops/activation/*.cc | grep -v quantized)"
language=$(printf '%s\n' $layer $model src/model/*.cc src/model/cuda/*.cc src/model/cuda/*.cu | sort -u)
declare -A sources=(
  [test_cuda_router]="$core $router tests/cuda/router_forward_test.cc tests/cuda/router_backward_test.cc tests/cuda/router_cases_test.cc tests/cuda/router_sums_test.cc tests/cuda/gate_test.cc
    src/capi/guard.cc src/capi/convert.cc src/capi/router_capi.cc tests/cuda/capi_test.cc tests/cuda/main.cc"
  [test_cuda_fabric]="$core $router $fabric tests/cuda/fabric_test.cc tests/cuda/fabric_interface_test.cc tests/cuda/engine_cuda_local.cc
    tests/fabric/collectives_test.cc tests/fabric/failures_test.cc tests/cuda/fabric_kernels.cu tests/cuda/core_test.cc tests/cuda/main.cc"
  [test_cuda_exchange]="$core $exchange tests/cuda/exchange_test.cc tests/cuda/exchange_chunks_test.cc tests/cuda/exchange_links_test.cc tests/cuda/exchange_routes_test.cc tests/cuda/node_exchange_test.cc tests/cuda/gemm_spin.cu tests/cuda/main.cc"
  [test_cuda_gemm]="$core $gemm $(ls tests/cuda/gemm_*test.cc) tests/cuda/main.cc"
  [test_cuda_fp8]="$core $fp8 $activation $quantize $(ls tests/cuda/fp8_*test.cc) tests/cuda/main.cc"
  [bench_cuda_fp8]="$core $fp8 $activation $quantize $loads tests/cuda/gemm_spin.cu bench/cuda/fp8_bench.cc bench/cuda/gemm_dense.cc"
  [test_cuda_quantized_gemm]="$core $gemm $quantize $(ls src/ops/gemm/quantized_*.cc src/ops/gemm/cuda/quantized_*.cc src/ops/gemm/cuda/part_offsets.cu src/ops/gemm/cuda/widened_*.cc src/ops/gemm/cuda/widened_*.cu src/ops/gemm/cuda/fp8_*.cc src/ops/gemm/cuda/fp8_*.cu) tests/cuda/quantized_gemm_test.cc tests/cuda/main.cc"
  [bench_cuda_quantized]="$core $gemm $quantize $(ls src/ops/gemm/quantized_*.cc src/ops/gemm/cuda/quantized_*.cc src/ops/gemm/cuda/part_offsets.cu src/ops/gemm/cuda/widened_*.cc src/ops/gemm/cuda/widened_*.cu src/ops/gemm/cuda/fp8_*.cc src/ops/gemm/cuda/fp8_*.cu) tests/cuda/gemm_spin.cu bench/cuda/quantized_bench.cc"
  [test_cuda_model]="$core $model tests/cuda/model_kernels_test.cc tests/cuda/optimizer_kernels_test.cc tests/cuda/main.cc"
  [test_cuda_train_run]="$core $language src/core/version.cc $(ls src/train/*.cc src/train/cuda/*.cc) tests/cuda/train_run_test.cc tests/cuda/main.cc"
  [test_cuda_training]="$core $language tests/cuda/device_model_test.cc tests/cuda/main.cc"
  [test_cuda_quantize]="$core $activation $quantize $(ls tests/cuda/quantize_*test.cc) tests/cuda/qdq_test.cc tests/cuda/main.cc"
  [bench_cuda_quantize]="$core $activation $quantize $loads tests/cuda/gemm_spin.cu bench/cuda/quantize_bench.cc"
  [bench_cuda_router]="$core $router src/balance/workload.cc bench/cuda/router_bench.cc"
  [test_cuda_moe]="$core $layer tests/cuda/moe_test.cc tests/cuda/moe_options_test.cc tests/cuda/moe_map_test.cc tests/cuda/moe_oracle_test.cc tests/cuda/moe_cases_test.cc tests/cuda/moe_forms_test.cc tests/cuda/moe_sizes_test.cc tests/cuda/moe_nodes_test.cc tests/cuda/moe_recipes_test.cc tests/cuda/main.cc"
  [bench_cuda_moe]="$core $layer tests/cuda/gemm_spin.cu bench/cuda/gemm_dense.cc $(ls bench/cuda/moe/*.cc bench/cuda/moe/*.cu) bench/cuda/moe_bench.cc"
  [bench_cuda_moe_phases]="$core $layer tests/cuda/gemm_spin.cu bench/cuda/moe_phases.cc"
  [test_cuda_nccl]="$core $layer $nccl tests/cuda/nccl_test.cc tests/cuda/nccl_lost_test.cc tests/cuda/moe_nccl_test.cc tests/cuda/nccl_main.cc"
  [bench_cuda_negative]="$core $exchange $(ls bench/negative/cuda/*.cu) bench/negative/cuda/exchange_negative.cc src/balance/workload.cc"
  [bench_cuda_exchange]="$core $exchange $nccl src/balance/workload.cc bench/cuda/exchange_bench.cc"
  [bench_cuda_gemm]="$core $gemm tests/cuda/gemm_spin.cu bench/cuda/gemm_bench.cc bench/cuda/gemm_dense.cc"
  [bench_cuda_activation]="$core $gemm tests/cuda/gemm_spin.cu bench/cuda/activation_bench.cc bench/cuda/gemm_dense.cc"
)
if [ -n "${GPU_BUILD_LIST:-}" ]; then  # the sources of a program
  echo ${sources[$GPU_BUILD_LIST]}
  exit 0
fi
programs=("$@")
[ ${#programs[@]} -gt 0 ] || programs=(test_cuda_router test_cuda_fabric test_cuda_exchange ${nccl:+test_cuda_nccl} test_cuda_gemm test_cuda_fp8 test_cuda_quantized_gemm test_cuda_quantize test_cuda_moe test_cuda_model test_cuda_training bench_cuda_router bench_cuda_exchange bench_cuda_negative bench_cuda_gemm bench_cuda_activation bench_cuda_fp8 bench_cuda_quantized bench_cuda_quantize bench_cuda_moe bench_cuda_moe_phases)
all=
for program in "${programs[@]}"; do
  for file in ${sources[$program]}; do [ -f "$file" ] && all+=" $file"; done
done
mkdir -p "$out/obj"
compile() {
  local source=$1 object
  object=$out/obj/$(echo "$1" | tr '/' '_').o
  case $source in
    *.cu) python3 cmake/check_ptxas.py "$nvcc" $cu_flags -c "$source" -o "$object" ;;
    *) g++ $cxx_flags -c "$source" -o "$object" ;;
  esac
}
export -f compile
export out nvcc cu_flags cxx_flags
# The longest compiles first.
printf '%s\n' $all | sort -u | awk '{print ($0 ~ /warp_long|grouped_|fp8_[nt]|quantize_tiles/ ? 0 : ($0 ~ /\.cu$/ ? 1 : 2)), $0}' | sort -n | cut -d' ' -f2 | xargs -P "$(nproc)" -I{} bash -c 'compile {} || exit 255'
case " ${programs[*]} " in *" test_cuda_nccl "*) g++ -shared -fPIC -o "$out/libother_nccl.so" tests/cuda/other_nccl.cc ;; esac
objects() { for file in "$@"; do [ -f "$file" ] && echo "$out/obj/$(echo "$file" | tr '/' '_').o"; done; }
for program in "${programs[@]}"; do
  g++ -o "$out/$program" $(objects ${sources[$program]}) ${deps:+-L$deps/lib} -lgtest -lgmock -L"$(dirname "$cuda_include")/lib64" -lcudart_static -ldl -lrt -pthread \
    -static-libstdc++ -static-libgcc
done
