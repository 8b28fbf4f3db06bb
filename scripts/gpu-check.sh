#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# How every GPU claim of the project is made. On a machine with a GPU and CUDA: builds (or takes) the GPU programs, runs all GPU tests,
# the compute-sanitizer on the small ones, and the benchmarks; writes bench/results/<gpu>/*.json and renders docs/performance.md.
#
#   scripts/gpu-check.sh [--bin DIR] [--out DIR] [--quick]
#     --bin DIR   use the programs in DIR (built elsewhere, static) instead of building
#     --out DIR   also copy logs and results there
#     --quick     no sanitizer
#   scripts/gpu-check.sh --check    CI, no GPU: docs/performance.md matches the results; lists results older than the sources
# A run with a failed check still writes its results; the page then says that they do not count.
# Environment: WAYBILL_GPU_DEPS (see scripts/gpu_build.sh), NVCC, PYTHON (the python3 that holds torch, for the peer); WAYBILL_LIBRARY and
# WAYBILL_JAX_LIBRARY for the Python bindings.
set -uo pipefail
cd "$(dirname "$0")/.."
bin= out= quick=0
while [ $# -gt 0 ]; do
  case $1 in
    --check) exec python3 scripts/render_performance.py --check ;;
    --bin) bin=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --quick) quick=1; shift ;;
    *) echo "gpu-check: unknown option $1" >&2; exit 2 ;;
  esac
done
command -v nvidia-smi >/dev/null && nvidia-smi -L | grep -q GPU || { echo "gpu-check: no GPU found (nvidia-smi -L lists none)" >&2; exit 2; }
work=$(mktemp -d)
failed=0
if [ -z "$bin" ]; then
  bin=$work/bin
  echo "gpu-check: building"
  scripts/gpu_build.sh "$bin" >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; echo "gpu-check: the build failed" >&2; exit 1; }
fi
checks=()
# "passed", "passed, N skipped: reason" (tests of the program that need more than is here), "skipped: reason" or "failed...".
note() { checks+=("\"$1\": \"$2\""); printf '%-44s %s\n' "$1" "$2"; [ "${2#passed}" != "$2" ] || [ "${2#skipped}" != "$2" ] || failed=1; }
file_of() { echo "$work/$(echo "$1" | tr -c 'a-z0-9\n' '_')"; }
start() { # name, command...: in the background; collect() reports it
  local file
  file=$(file_of "$1")
  names+=("$1")
  shift
  ("$@" >"$file.log" 2>&1; echo $? >"$file.rc") &
}
collect() {
  local name file
  wait
  for name in "${names[@]}"; do
    file=$(file_of "$name")
    if [ "$(cat "$file.rc")" = 0 ]; then note "$name" "passed$(python3 scripts/gtest_skips.py "$file.log")"; else note "$name" failed; tail -20 "$file.log" >&2; fi
  done
  names=()
}
names=()
# The NCCL library whose version is that of the header in the programs: beside that header, torch's, or the loader's own.
if [ -z "${WAYBILL_NCCL_LIBRARY:-}" ] && [ -x "$bin/test_cuda_nccl" ]; then
  torch_nccl=$("${PYTHON:-python3}" -c 'import os, nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2>/dev/null)
  nccl_library=
  for library in ${WAYBILL_NCCL_INCLUDE:+"$WAYBILL_NCCL_INCLUDE/../lib/libnccl.so.2"} ${torch_nccl:+"$torch_nccl/lib/libnccl.so.2"} libnccl.so.2; do
    [ -n "$nccl_library" ] || ! WAYBILL_NCCL_LIBRARY=$library "$bin/test_cuda_nccl" --check-nccl >>"$work/nccl.log" 2>&1 || nccl_library=$library
  done
  if [ -n "$nccl_library" ]; then export WAYBILL_NCCL_LIBRARY=$nccl_library; else note "NCCL library" "failed: none of the header's version"; cat "$work/nccl.log" >&2; fi
fi
# Tests and sanitizers together: most of their time is the CPU's. Benchmarks run alone.
for program in test_cuda_router test_cuda_fabric test_cuda_exchange test_cuda_nccl test_cuda_gemm test_cuda_fp8 test_cuda_quantized_gemm test_cuda_quantize test_cuda_moe test_cuda_model test_cuda_training bench_cuda_router bench_cuda_exchange bench_cuda_gemm bench_cuda_activation bench_cuda_fp8 bench_cuda_quantized bench_cuda_quantize bench_cuda_moe bench_cuda_moe_phases; do
  if [ ! -x "$bin/$program" ] && [ $program = test_cuda_nccl ]; then
    note "$program" "skipped: built without NCCL's headers"
  elif [ ! -x "$bin/$program" ]; then
    note "$program" "failed: not built"
  elif [ "${program#bench}" = "$program" ] && [ $program != test_cuda_nccl ]; then
    start "$program" "$bin/$program"
  fi
done
if [ $quick = 0 ]; then
  small_router='RouterCasesCuda.F0*:RouterForwardCuda.ShortRows*:RouterForwardCuda.WeightsIgnore*:RouterForwardCuda.Replay*:RouterForwardCuda.Parity*:RouterBackwardCuda.Parity*'
  small_gemm='GroupedGemmCuda.NoRows*:ActivationCuda.Fp32*:GroupedGemmActivationApiCuda.*:GroupedGemmCuda.AGroup*:GroupedGemmCuda.ARow*:GroupedGemmCuda.Broken*:GroupedGemmApiCuda.Wgrad*'
  small_fp8='GroupedFp8Cuda.NoRows*:GroupedFp8Cuda.AGroup*:GroupedFp8Cuda.ARow*:GroupedFp8Cuda.Broken*'
  small_quantize='QuantizeBadInputCuda.*:QuantizeCuda.Widths*:QuantizeCuda.RowsWithStrides:QuantizeCuda.ACaptured*'
  small_model='ModelKernelsCuda.*:OptimizerCuda.AnInvalid*'
  small_fabric='Ranks/CudaLocal.*/1:Ranks/CudaLocal.*/2:CudaLocalFabric.W*:CudaLocalFabric.ADevice*'
  small_exchange='Ranks/ExchangeChunksCuda.*/1:Ranks/ExchangeCuda.*/1:Ranks/ExchangeCuda.*/4:ExchangeHardRoutesCuda.Bad*:ExchangeHardRoutesCuda.ADup*:ExchangeBudgetCuda.*:ExchangeBackwardCuda.*:ExchangeScalesCuda.*'
  small_moe='Ranks/MoeCuda.AgreesWithTheLayerOnTheCpuAtRagged*/4:Ranks/MoeCuda.AnExceeded*/2'
  if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck initcheck; do
      # The score sums under memcheck alone: docs/testing.md says what racecheck finds in them.
      more=
      [ $tool = initcheck ] || more=':CApiCuda.*'
      [ $tool != memcheck ] || more+=':RouterSumsCuda.AFew*'
      start "$tool router" timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/test_cuda_router" --gtest_filter="$small_router$more"
      # The matmuls under memcheck alone.
      [ $tool != memcheck ] || start "$tool gemm" timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/test_cuda_gemm" --gtest_filter="$small_gemm"
      [ $tool != memcheck ] || start "$tool fp8" timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/test_cuda_fp8" --gtest_filter="$small_fp8"
      [ $tool != memcheck ] || start "$tool moe" timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/test_cuda_moe" --gtest_filter="$small_moe"
      start "$tool quantize" timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/test_cuda_quantize" --gtest_filter="$small_quantize"
      start "$tool model" timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/test_cuda_model" --gtest_filter="$small_model"
      start "$tool exchange" timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/test_cuda_exchange" --gtest_filter="$small_exchange"
      start "$tool fabric" timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/test_cuda_fabric" --gtest_filter="$small_fabric"
    done
  else
    note sanitizer "skipped: compute-sanitizer is not installed"
  fi
fi
collect
# Its ranks are processes that wait for each other: alone on the GPUs.
if [ -x "$bin/test_cuda_nccl" ]; then
  start test_cuda_nccl timeout 150 "$bin/test_cuda_nccl"
  collect
fi
start "benchmark router" "$bin/bench_cuda_router" "$work/router.jsonl" --loads
collect
start "benchmark exchange" "$bin/bench_cuda_exchange" "$work/exchange.jsonl" --loads
collect
if [ "$(nvidia-smi -L | wc -l)" -gt 1 ] && [ -x "$bin/bench_cuda_negative" ]; then
  start "ablation of the exchange" "$bin/bench_cuda_negative" "$work/negative.jsonl"
  collect
  cat "$work/negative.jsonl" >>"$work/exchange.jsonl"
fi
if [ "$(nvidia-smi -L | wc -l)" -gt 1 ] && [ -x "$bin/test_cuda_nccl" ]; then
  start "benchmark exchange, 2 processes" "$bin/bench_cuda_exchange" "$work/exchange_processes.jsonl" --processes
  collect
  cat "$work/exchange_processes.jsonl" >>"$work/exchange.jsonl"
fi
start "benchmark gemm" "$bin/bench_cuda_gemm" "$work/gemm.jsonl" --loads
collect
start "benchmark fp8" "$bin/bench_cuda_fp8" "$work/fp8.jsonl" --loads
collect
start "benchmark quantized gemm" "$bin/bench_cuda_quantized" "$work/quantized.jsonl"
collect
[ ! -s "$work/quantized.jsonl" ] || cat "$work/quantized.jsonl" >>"$work/fp8.jsonl"
start "benchmark quantize" "$bin/bench_cuda_quantize" "$work/quantize.jsonl" --loads
collect
start "phases of the MoE layer" "$bin/bench_cuda_moe_phases"
collect
start "benchmark activation" "$bin/bench_cuda_activation" "$work/activation.jsonl" --loads
collect
# Times 18 to 47 ms a step and design: about three minutes. WAYBILL_MOE_OPTIONS replaces the options (--iterations 20: a short run).
start "benchmark moe" "$bin/bench_cuda_moe" "$work/moe.jsonl" ${WAYBILL_MOE_OPTIONS:---ablation --f32}
collect
start "benchmark moe, loads" "$bin/bench_cuda_moe" "$work/moe_loads.jsonl" --shape sparser-ep72 --stack sparse,dense-map,padded,capacity --iterations 40 \
  --load W0,W1,W2,W3,W4,W5,W6,W7,W8,W9
collect
[ ! -s "$work/moe_loads.jsonl" ] || grep -v '"evidence":"kernel"' "$work/moe_loads.jsonl" >>"$work/moe.jsonl"
[ ! -s "$work/activation.jsonl" ] || cat "$work/activation.jsonl" >>"$work/gemm.jsonl"
peers=
if "${PYTHON:-python3}" bench/cuda/torch_router.py "$work/torch.jsonl" >"$work/torch.log" 2>&1; then peers=$work/torch.jsonl; else note "peer torch" "skipped: torch did not run"; fi
grouped=
if "${PYTHON:-python3}" bench/peers/torch_grouped.py "$work/torch_grouped.jsonl" --loads >"$work/torch_grouped.log" 2>&1; then grouped=$work/torch_grouped.jsonl; else note "peer torch grouped" "skipped: torch did not run"; fi
fp8=
if "${PYTHON:-python3}" bench/peers/torch_grouped.py "$work/torch_fp8.jsonl" --fp8 >"$work/torch_fp8.log" 2>&1; then fp8=$work/torch_fp8.jsonl; else note "peer torch fp8" "skipped: torch did not run"; fi
if [ "$(nvidia-smi -L | wc -l)" -gt 1 ] && "${PYTHON:-python3}" bench/peers/torch_moe_ep.py "$work/torch_moe.jsonl" >"$work/torch_moe.log" 2>&1; then
  cat "$work/torch_moe.jsonl" >>"$work/moe.jsonl"
else
  note "peer torch moe" "skipped: torch did not run, or there is one GPU"
fi
# The Python bindings, where their libraries are (built here or elsewhere, with the GPU machine's libstdc++ or an older one).
for framework in jax torch; do
  name="bindings, $framework" log=$work/bindings_$framework.log
  if [ -z "${WAYBILL_LIBRARY:-}" ] || { [ $framework = jax ] && [ -z "${WAYBILL_JAX_LIBRARY:-}" ]; }; then
    note "$name" "skipped: WAYBILL_LIBRARY and WAYBILL_JAX_LIBRARY must name the libraries"
    continue
  fi
  (cd bindings/tests && PYTHONPATH=$PWD/../python${PYTHONPATH:+:$PYTHONPATH} timeout 300 "${PYTHON:-python3}" -m pytest -q -rs -p no:cacheprovider "cuda/${framework}_cuda_test.py") >"$log" 2>&1
  rc=$?
  if [ $rc != 0 ]; then
    note "$name" failed
    tail -20 "$log" >&2
  elif grep -q '[0-9] passed' "$log"; then
    note "$name" passed
    PYTHONPATH=$PWD/bindings/python${PYTHONPATH:+:$PYTHONPATH} timeout 300 "${PYTHON:-python3}" bench/peers/gpu_bindings.py $framework --cpp "$work/gemm.jsonl" >"$work/gpu_bindings_$framework.log" 2>&1 && cat "$work/gpu_bindings_$framework.log" || note "benchmark $name" failed
  else
    note "$name" "skipped: $(sed -n 's/^SKIPPED.*_test.py[:0-9]*: //p' "$log" | head -n 1)"
  fi
done
(IFS=,; echo "{${checks[*]}}") >"$work/checks.json"
if [ -s "$work/router.jsonl" ]; then
  python3 scripts/gpu_results.py router "$work/router.jsonl" $peers --checks "$work/checks.json" || failed=1
fi
[ ! -s "$work/exchange.jsonl" ] || python3 scripts/gpu_results.py exchange "$work/exchange.jsonl" --checks "$work/checks.json" || failed=1
[ ! -s "$work/gemm.jsonl" ] || python3 scripts/gpu_results.py gemm "$work/gemm.jsonl" $grouped --checks "$work/checks.json" || failed=1
[ ! -s "$work/fp8.jsonl" ] || python3 scripts/gpu_results.py fp8 "$work/fp8.jsonl" $fp8 --checks "$work/checks.json" || failed=1
[ ! -s "$work/quantize.jsonl" ] || python3 scripts/gpu_results.py quantize "$work/quantize.jsonl" --checks "$work/checks.json" || failed=1
[ ! -s "$work/moe.jsonl" ] || python3 scripts/gpu_results.py moe "$work/moe.jsonl" --checks "$work/checks.json" || failed=1
python3 scripts/render_performance.py || failed=1
if [ -n "$out" ]; then
  mkdir -p "$out"
  cp bench/results/*/{router,exchange,gemm,fp8,quantize,moe}.json "$out/" 2>/dev/null
  tar czf "$out/logs.tgz" -C "$work" --exclude=bin --exclude=obj . 2>/dev/null
fi
[ $failed = 0 ] && echo "gpu-check: passed" || echo "gpu-check: FAILED (logs in $work)" >&2
exit $failed
