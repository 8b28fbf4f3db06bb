#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# How every GPU claim of the project is made. On a machine with a GPU and CUDA: builds (or takes) the GPU programs, runs all GPU tests,
# the compute-sanitizer on the small ones, and the benchmarks; writes bench/results/<gpu>/*.json and renders docs/performance.md.
#
#   scripts/gpu-check.sh [--bin DIR] [--out DIR] [--quick] [--areas LIST]
#     --bin DIR   use the programs in DIR (built elsewhere, static) instead of building
#     --out DIR   also copy logs and results there
#     --quick     no sanitizer
#     --areas LIST  benchmarks of these areas only, in this order (default: exchange,moe,router,quantize,fp8,gemm,bindings); tests always run whole
#   scripts/gpu-check.sh --check    CI, no GPU: docs/performance.md matches the results; lists results older than the sources
# A run with a failed check still writes its results; the page then says that the areas which stand on it do not count, and names it in the others.
# Results of an area are written as soon as it is measured, so that a run that is cut short keeps what it has.
# Environment: WAYBILL_GPU_DEPS (see scripts/gpu_build.sh), NVCC, PYTHON (the python3 that holds torch, for the peer); WAYBILL_LIBRARY and
# WAYBILL_JAX_LIBRARY for the Python bindings.
set -uo pipefail
cd "$(dirname "$0")/.."
bin= out= quick=0 areas=exchange,moe,router,quantize,fp8,gemm,bindings
while [ $# -gt 0 ]; do
  case $1 in
    --check) exec python3 scripts/render_performance.py --check ;;
    --bin) bin=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --quick) quick=1; shift ;;
    --areas) areas=$2; shift 2 ;;
    *) echo "gpu-check: unknown option $1" >&2; exit 2 ;;
  esac
done
for area in ${areas//,/ }; do
  case $area in exchange | moe | router | quantize | fp8 | gemm | bindings) ;; *) echo "gpu-check: unknown area $area" >&2; exit 2 ;; esac
done
command -v nvidia-smi >/dev/null && nvidia-smi -L | grep -q GPU || { echo "gpu-check: no GPU found (nvidia-smi -L lists none)" >&2; exit 2; }
work=$(mktemp -d)
failed=0
python=${PYTHON:-python3}
if [ -z "$bin" ]; then
  bin=$work/bin
  echo "gpu-check: building"
  scripts/gpu_build.sh "$bin" >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; echo "gpu-check: the build failed" >&2; exit 1; }
fi
checks=()
# "passed", "passed, N skipped: reason" (tests of the program that need more than is here), "skipped: reason" or "failed...".
note() { checks+=("\"$1\": \"$2\""); printf '%-44s %s\n' "$1" "$2"; [ "${2#passed}" != "$2" ] || [ "${2#skipped}" != "$2" ] || failed=1; }
file_of() { echo "$work/$(echo "$1" | tr -c 'a-z0-9\n' '_')"; }
num_gpus=$(nvidia-smi -L | wc -l)
# Tests that run together begin with another GPU each, so that not all of them wait for the first.
spread=0
rotated() { # n: all GPUs, from the n-th on
  local g list=
  for ((g = 0; g < num_gpus; ++g)); do list+=,$((($1 + g) % num_gpus)); done
  echo "${list#,}"
}
start() { # name, command...: in the background; collect() reports it
  local file
  file=$(file_of "$1")
  names+=("$1")
  shift
  (
    [ $spread = 0 ] || [ "$num_gpus" -eq 1 ] || [ -n "${CUDA_VISIBLE_DEVICES:-}" ] || CUDA_VISIBLE_DEVICES=$(rotated ${#names[@]})
    [ -z "${CUDA_VISIBLE_DEVICES:-}" ] || export CUDA_VISIBLE_DEVICES
    "$@" >"$file.log" 2>&1
    echo $? >"$file.rc"
  ) &
  pids+=($!)
}
collect() {
  local name file
  wait "${pids[@]}"
  for name in "${names[@]}"; do
    file=$(file_of "$name")
    if [ "$(cat "$file.rc")" = 0 ]; then note "$name" "passed$(python3 scripts/gtest_skips.py "$file.log")"; else note "$name" failed; grep -n FAILED "$file.log" | head -20 >&2; tail -20 "$file.log" >&2; fi
  done
  names=() pids=()
}
names=() pids=()
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
spread=1
for program in test_cuda_router test_cuda_fabric test_cuda_exchange test_cuda_nccl test_cuda_gemm test_cuda_fp8 test_cuda_quantized_gemm test_cuda_quantize test_cuda_moe test_cuda_model test_cuda_training test_cuda_train_run test_cuda_jax_ranks bench_cuda_router bench_cuda_exchange bench_cuda_gemm bench_cuda_activation bench_cuda_fp8 bench_cuda_quantized bench_cuda_quantize bench_cuda_moe bench_cuda_moe_phases; do
  if [ ! -x "$bin/$program" ] && [ $program = test_cuda_nccl ]; then
    note "$program" "skipped: built without NCCL's headers"
  elif [ ! -x "$bin/$program" ] && [ $program = test_cuda_train_run ]; then
    note "$program" "skipped: built without toml++ and nlohmann-json"
  elif [ ! -x "$bin/$program" ] && [ $program = test_cuda_jax_ranks ]; then
    note "$program" "skipped: built without jaxlib's headers"
  elif [ ! -x "$bin/$program" ]; then
    note "$program" "failed: not built"
  elif [ $program = test_cuda_moe ]; then
    # Most of its time is the reference's on the CPU: in parts beside each other.
    [ "$num_gpus" -eq 1 ] || start "first steps of two GPUs" "$bin/$program" --gtest_filter='MoeTwoGpus.AFirstStep*:MoeTwoGpus.ARankWithoutTokens*'
    for part in 0 1 2 3; do start "$program, part $((part + 1)) of 4" env GTEST_TOTAL_SHARDS=4 GTEST_SHARD_INDEX=$part "$bin/$program"; done
  elif [ "${program#bench}" = "$program" ] && [ $program != test_cuda_nccl ]; then
    start "$program" "$bin/$program"
  fi
done
if [ $quick = 0 ]; then
  small_router='RouterCasesCuda.F0*:RouterForwardCuda.ShortRows*:RouterForwardCuda.WeightsIgnore*:RouterForwardCuda.Replay*:RouterForwardCuda.Parity*:RouterBackwardCuda.Parity*:RouterBackwardCuda.LossesOf*'
  small_gemm='GroupedGemmCuda.NoRows*:ActivationCuda.Fp32*:GroupedGemmActivationApiCuda.*:GroupedGemmCuda.AGroup*:GroupedGemmCuda.ARow*:GroupedGemmCuda.Broken*:GroupedGemmApiCuda.Wgrad*'
  small_fp8='GroupedFp8Cuda.NoRows*:GroupedFp8Cuda.AGroup*:GroupedFp8Cuda.ARow*:GroupedFp8Cuda.Broken*'
  small_quantize='QuantizeBadInputCuda.*:QuantizeCuda.Widths*:QuantizeCuda.RowsWithStrides:QuantizeCuda.ACaptured*:QuantizeActivatedCuda.RowsWithStrides*'
  small_model='ModelKernelsCuda.*:OptimizerCuda.AnInvalid*'
  small_fabric='Ranks/CudaLocal.*/1:Ranks/CudaLocal.*/2:CudaLocalFabric.W*:CudaLocalFabric.ADevice*'
  small_exchange='Ranks/ExchangeChunksCuda.*/1:Ranks/ExchangeCuda.*/1:Ranks/ExchangeCuda.*/4:ExchangeHardRoutesCuda.Bad*:ExchangeHardRoutesCuda.ADup*:ExchangeBudgetCuda.*:ExchangeBackwardCuda.*:ExchangeScalesCuda.*'
  small_moe='Ranks/MoeCuda.AgreesWithTheLayerOnTheCpuAtRagged*/4:Ranks/MoeCuda.AnExceeded*/2'
  if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck initcheck; do
      more=
      [ $tool = initcheck ] || more=':CApiCuda.*:RouterSumsCuda.AFew*'
      start "$tool router" timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/test_cuda_router" --gtest_filter="$small_router$more"
      # The matmuls under memcheck alone.
      [ $tool != memcheck ] || start "$tool gemm" timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/test_cuda_gemm" --gtest_filter="$small_gemm"
      [ $tool != memcheck ] || start "$tool fp8" timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/test_cuda_fp8" --gtest_filter="$small_fp8"
      [ $tool != memcheck ] || start "$tool quantized gemm" timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/test_cuda_quantized_gemm" --gtest_filter='QuantizedGemmCuda.WidensRows*'
      [ $tool != memcheck ] || start "$tool moe" timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/test_cuda_moe" --gtest_filter="$small_moe"
      start "$tool quantize" timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/test_cuda_quantize" --gtest_filter="$small_quantize"
      start "$tool model" timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/test_cuda_model" --gtest_filter="$small_model"
      # Between nodes whole chunks of fixed size travel, with bytes that nobody wrote or reads: not under initcheck.
      more=
      [ $tool = initcheck ] || more=':Nodes/NodeExchangeCuda.An*/1'
      start "$tool exchange" timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/test_cuda_exchange" --gtest_filter="$small_exchange$more"
      start "$tool fabric" timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/test_cuda_fabric" --gtest_filter="$small_fabric"
    done
  else
    note sanitizer "skipped: compute-sanitizer is not installed"
  fi
fi
# The Python bindings, where their libraries are (built here or elsewhere, with the GPU machine's libstdc++ or an older one).
bindings=()
if [[ ,$areas, == *,bindings,* ]]; then
  for framework in jax torch; do
    if [ -n "${WAYBILL_LIBRARY:-}" ] && { [ $framework = torch ] || [ -n "${WAYBILL_JAX_LIBRARY:-}" ]; }; then
      bindings+=("$framework")
      local_ranks=
      [ $framework != jax ] || local_ranks=cuda/jax_local_cuda_test.py
      start "bindings, $framework" scripts/gpu_bindings_tests.sh "$python" "cuda/${framework}_cuda_test.py" "cuda/${framework}_block_cuda_test.py" "cuda/${framework}_recipes_cuda_test.py" $local_ranks
    else
      note "bindings, $framework" "skipped: WAYBILL_LIBRARY and WAYBILL_JAX_LIBRARY must name the libraries"
    fi
  done
fi
collect
spread=0
# Ranks are processes that wait for each other: alone on the GPUs.
if [ -x "$bin/test_cuda_nccl" ]; then
  start test_cuda_nccl timeout 150 "$bin/test_cuda_nccl"
  collect
fi
if [ ${#bindings[@]} = 2 ]; then
  start "bindings, 2 processes" scripts/gpu_bindings_tests.sh "$python" cuda/ep_cuda_test.py
  collect
fi
measure() { # name, program, arguments...: alone
  start "$@"
  collect
}
peer() { # name, output, script and arguments...: leaves the output's path in peers where the peer ran
  local name=$1
  peers=$2
  shift 2
  "$python" "$@" >"$peers.log" 2>&1 || { peers=; note "$name" "skipped: torch did not run"; }
}
record() { # area, records, peers
  (IFS=,; echo "{${checks[*]}}") >"$work/checks.json"
  [ ! -s "$2" ] || python3 scripts/gpu_results.py "$1" "$2" ${3:-} --checks "$work/checks.json" || failed=1
  [ -z "$out" ] || { mkdir -p "$out" && cp bench/results/*/"$1".json "$out/" 2>/dev/null; }
}
append() { [ ! -s "$1" ] || cat "$1" >>"$2"; }

area_exchange() {
  measure "benchmark exchange" "$bin/bench_cuda_exchange" "$work/exchange.jsonl" --loads
  measure "ablation of the exchange" "$bin/bench_cuda_negative" "$work/negative.jsonl"  # one GPU: two virtual ranks
  append "$work/negative.jsonl" "$work/exchange.jsonl"
  if [ "$num_gpus" -gt 1 ] && [ -x "$bin/test_cuda_nccl" ]; then
    measure "benchmark exchange, 2 processes" "$bin/bench_cuda_exchange" "$work/exchange_processes.jsonl" --processes
    append "$work/exchange_processes.jsonl" "$work/exchange.jsonl"
  fi
  record exchange "$work/exchange.jsonl"
}
# Two GPUs: 18 to 47 ms a step and design, about five minutes with the peer. One GPU: one rank, where nothing is exchanged, with every design and each step
# of the ablation at 160 steps (those of H 7168 for 0.8 s each), PyTorch's layer beside it, and the two main designs as 2, 4 and 8 virtual ranks:
# about two minutes and a half. WAYBILL_MOE_OPTIONS, WAYBILL_MOE_LOADS and WAYBILL_MOE_PEER_OPTIONS replace the options.
area_moe() {
  local options="--ablation --f32 --wgrad-control" peer_options="" loads="--stack sparse,dense-map,padded,capacity --load W0,W1,W2,W3,W4,W5,W6,W7,W8,W9"
  if [ "$num_gpus" -eq 1 ]; then
    options="--ranks 1 --ablation --eager sparse --most-seconds 0.8 --stack sparse,exact,exact-resend,exact-blocks,dense-map,padded,capacity,loop"
    peer_options="--ranks 1 --variant grouped loop"
    loads="--ranks 1 --eager none --stack sparse,padded --load W0,W1,W2,W3,W4,W5,W6,W7,W8,W9"
  fi
  measure "benchmark moe" "$bin/bench_cuda_moe" "$work/moe.jsonl" ${WAYBILL_MOE_OPTIONS:-$options}
  record moe "$work/moe.jsonl"
  if "$python" bench/peers/torch_moe_ep.py "$work/torch_moe.jsonl" ${WAYBILL_MOE_PEER_OPTIONS:-$peer_options} >"$work/torch_moe.log" 2>&1; then
    append "$work/torch_moe.jsonl" "$work/moe.jsonl"
  else
    note "peer torch moe" "skipped: torch did not run"
  fi
  record moe "$work/moe.jsonl"
  if [ "$num_gpus" -eq 1 ]; then
    local ranks
    for ranks in 2 4 8; do
      measure "benchmark moe, $ranks virtual ranks" "$bin/bench_cuda_moe" "$work/moe_virtual.jsonl" --ranks $ranks --shape sparser-ep72 --stack sparse,dense-map --eager none
      [ ! -s "$work/moe_virtual.jsonl" ] || grep -v '"evidence":"kernel"' "$work/moe_virtual.jsonl" >>"$work/moe.jsonl"
    done
  fi
  measure "benchmark moe, loads" "$bin/bench_cuda_moe" "$work/moe_loads.jsonl" --shape sparser-ep72 --iterations 40 ${WAYBILL_MOE_LOADS:-$loads}
  [ ! -s "$work/moe_loads.jsonl" ] || grep -v '"evidence":"kernel"' "$work/moe_loads.jsonl" >>"$work/moe.jsonl"
  record moe "$work/moe.jsonl"
  [ "$num_gpus" -eq 1 ] || measure "phases of the MoE layer" "$bin/bench_cuda_moe_phases"
}
area_router() {
  measure "benchmark router" "$bin/bench_cuda_router" "$work/router.jsonl" --loads
  peer "peer torch" "$work/torch.jsonl" bench/cuda/torch_router.py "$work/torch.jsonl"
  record router "$work/router.jsonl" $peers
}
area_quantize() {
  measure "benchmark quantize" "$bin/bench_cuda_quantize" "$work/quantize.jsonl" --loads
  record quantize "$work/quantize.jsonl"
}
area_fp8() {
  measure "benchmark fp8" "$bin/bench_cuda_fp8" "$work/fp8.jsonl" --loads
  measure "benchmark quantized gemm" "$bin/bench_cuda_quantized" "$work/quantized.jsonl"
  append "$work/quantized.jsonl" "$work/fp8.jsonl"
  peer "peer torch fp8" "$work/torch_fp8.jsonl" bench/peers/torch_grouped.py "$work/torch_fp8.jsonl" --fp8
  record fp8 "$work/fp8.jsonl" $peers
}
area_gemm() {
  measure "benchmark gemm" "$bin/bench_cuda_gemm" "$work/gemm.jsonl" --loads
  measure "benchmark activation" "$bin/bench_cuda_activation" "$work/activation.jsonl" --loads
  append "$work/activation.jsonl" "$work/gemm.jsonl"
  peer "peer torch grouped" "$work/torch_grouped.jsonl" bench/peers/torch_grouped.py "$work/torch_grouped.jsonl" --loads
  record gemm "$work/gemm.jsonl" $peers
}
area_bindings() {
  # The rate that the same kernel reaches from C++.
  local cpp=$work/gemm.jsonl framework
  [ -s "$cpp" ] || { cpp=$work/cpp.jsonl && "$bin/bench_cuda_gemm" "$cpp" --filter "32x1024 N4096 C7168 even" >"$work/cpp.log" 2>&1; }
  for framework in "${bindings[@]}"; do
    measure "benchmark bindings, $framework" env PYTHONPATH="$PWD/bindings/python${PYTHONPATH:+:$PYTHONPATH}" timeout 300 "$python" bench/peers/gpu_bindings.py "$framework" --cpp "$cpp"
    cat "$(file_of "benchmark bindings, $framework").log"
  done
}
for area in ${areas//,/ }; do "area_$area"; done
python3 scripts/render_performance.py || failed=1
[ -z "$out" ] || tar czf "$out/logs.tgz" -C "$work" --exclude=bin --exclude=obj . 2>/dev/null
[ $failed = 0 ] && echo "gpu-check: passed" || echo "gpu-check: FAILED (logs in $work)" >&2
exit $failed
