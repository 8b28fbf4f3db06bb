#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Plants known faults in the CUDA router and the CUDA exchange, one at a time, and confirms that their GPU tests fail for each. Needs a GPU and nvcc.
#   scripts/gpu_faults.sh OUT [fault ...]     OUT: a folder that scripts/gpu_build.sh OUT test_cuda_router test_cuda_exchange has filled (its objects are
#                                             reused; faults of a program that is not there are left out)
#   scripts/gpu_faults.sh --build DIR OUT [fault ...]   only builds: DIR/<fault>/{test,filter}, for a machine with a GPU but without the build's packages
#   scripts/gpu_faults.sh --run DIR [fault ...]         runs what --build has made, by GPU in CUDA_VISIBLE_DEVICES, JOBS (1) at a time
# The sources are not changed: the folder of the kernels is copied, the fault is planted in the copy, the one unit it shows in is compiled.
# Exit code 1 when a fault is not caught (or no longer applies). docs/testing.md lists the faults.
set -uo pipefail
cd "$(dirname "$0")/.."
mode=all build_to= out=
case ${1:-} in
  --build) mode=build build_to=$2 out=$3; shift 3 ;;
  --run) mode=run build_to=$2; shift 2 ;;
  *) out=$1; shift ;;
esac
only=" $* "
run_fault() { # folder with test and filter, name
  timeout 120 "$1/test" --gtest_fail_fast --gtest_filter="$(cat "$1/filter")" >"$1/test.log" 2>&1
  local code=$?
  if [ $code = 0 ]; then
    echo "$2: NOT CAUGHT by $(cat "$1/filter")"
    echo 1 >"$1/failed"
  else
    echo "$2: caught (exit code $code) by $(grep -oE '^\[  FAILED  \] [A-Za-z.]+' "$1/test.log" | awk '{print $4}' | sort -u | tr '\n' ' ')"
  fi
}
if [ $mode = run ]; then
  export -f run_fault
  for folder in "$build_to"/*/; do
    name=$(basename "$folder")
    [ "$only" = "  " ] || [[ $only == *" $name "* ]] || continue
    rm -f "$folder/failed"
    printf '%s %s\n' "${folder%/}" "$name"
  done | xargs -P "${JOBS:-1}" -L1 bash -c 'run_fault "$0" "$1"'
  ! ls "$build_to"/*/failed >/dev/null 2>&1
  exit
fi
deps=${WAYBILL_GPU_DEPS:-}
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
work=${build_to:-$(mktemp -d)}
mkdir -p "$work"
area() { # program, folder of the kernels: what the plants below are for
  program=$1 kernels=$2
  sources=$(GPU_BUILD_LIST=$program scripts/gpu_build.sh "$out")
}

plant() { # name, file, unit, text, faulty text, tests
  local name=$1 file=$2 unit=$3 folder=$work/$1
  [ "$only" = "  " ] || [[ $only == *" $name "* ]] || return 0
  [ -x "$out/$program" ] || return 0
  mkdir -p "$folder/$kernels"
  cp src/"$kernels"/* "$folder/$kernels/"
  python3 - "$folder/$kernels/$file" "$4" "$5" <<'P' || { echo "$name: does not apply"; echo 1 >"$folder/failed"; return; }
import sys
path, text, faulty = sys.argv[1:]
source = open(path, encoding="utf-8").read()
sys.exit(source.count(text) != 1 or not open(path, "w", encoding="utf-8").write(source.replace(text, faulty)))
P
  "$nvcc" -std=c++20 -O3 -DFMT_HEADER_ONLY=1 -gencode=arch=compute_90a,code=sm_90a -fmad=false --expt-relaxed-constexpr --extended-lambda \
    -Xcompiler=-ffp-contract=off -I"$folder" -Iinclude -Isrc -Itests -I. ${deps:+-isystem $deps/include} -c "$folder/$kernels/$unit" -o "$folder/unit.o" \
    2>"$folder/compile.log" || { echo "$name: does not compile"; tail -3 "$folder/compile.log"; echo 1 >"$folder/failed"; return; }
  local objects=$folder/unit.o source
  for source in $sources; do
    [ "$source" = "src/$kernels/$unit" ] || [ ! -f "$source" ] || objects+=" $out/obj/$(echo "$source" | tr '/' '_').o"
  done
  g++ -o "$folder/test" $objects ${deps:+-L$deps/lib} -lgtest -lgmock -L"$cuda/lib64" -lcudart_static -ldl -lrt -pthread 2>"$folder/link.log" ||
    { echo "$name: does not link"; tail -3 "$folder/link.log"; echo 1 >"$folder/failed"; return; }
  echo "$6" >"$folder/filter"
  if [ $mode = build ]; then
    strip "$folder/test"
    rm -rf "$folder/unit.o" "${folder:?}/${kernels%%/*}"
    return
  fi
  run_fault "$folder" "$name"
}
area test_cuda_router ops/router/cuda
all='RouterForwardCuda.*:RouterBackwardCuda.*'
plant groups router_forward_quad.cuh router_forward_quad_f32.cu 'has_hits = active && (kept >> sub & 1u) != 0;' 'has_hits = active && (kept >> sub & 3u) != 0;' "$all" &
plant ties router_quad_select.cuh router_forward_quad_f32.cu 'other == key[q] && other_id < id[q]' 'other == key[q] && other_id > id[q]' "$all" &
plant offsets router_counts.cuh router_forward_quad_f32.cu 'p.offsets[e + 1] = static_cast<std::int32_t>(before);' 'p.offsets[e + 1] = static_cast<std::int32_t>(before - n);' "$all" &
plant margin router_quad_groups.cuh router_forward_quad_f32.cu 'score - (2.5e-6f + 8.0e-7f * amplitude)' 'score + 0.0f * amplitude' "$all" &
plant rest router_backward.cu router_backward.cu 'kSmallestRest = 0.04f' 'kSmallestRest = 0.0f' "$all" &
plant sums_row router_forward_sums.cuh router_forward_sums_f32.cu 'for (int r = 0; r < kGroup; ++r) {' 'for (int r = 1; r < kGroup; ++r) {' 'RouterSumsCuda.*' &
plant centre router_backward.cu router_backward.cu 'w[s] * (g[s] - (renormalise ? dot : 0.0f))' 'w[s] * g[s]' "$all" &
wait
area test_cuda_exchange exchange/cuda
ranks='Ranks/ExchangeCuda.*' chunks='Ranks/ExchangeChunksCuda.*' layout='Ranks/ExchangeCuda.*:ExchangeLayoutCuda.*'
launches='Ranks/ExchangeTwoLaunches.RanksUp*'
all='Ranks/ExchangeCuda.*:Ranks/ExchangeChunksCuda.*:ExchangeHardRoutesCuda.*:ExchangeBudgetCuda.*:ExchangeBackwardCuda.*:ExchangeGraphCuda.*:ExchangeLayoutCuda.*'
plant rows plan_entries.cuh plan_fused_i16.cu 'base.rows[r] + row_start[r]' 'base.rows[r]' "$all" &
plant within plan_entries.cuh plan_fused_i16.cu 'slot_start[tile_token(i) * P + r] + routes.before[i][c];' 'slot_start[tile_token(i) * P + r];' "$all" &
plant budget plan_counts.cuh plan_fused_i16.cu 'header.max_slot_demand <= shape.slot_budget' 'header.max_slot_demand < shape.slot_budget' "$all" &
plant epoch plan_counts.cuh plan_fused_i16.cu '  close_epoch(q, rank, kSignalCounts, epoch);' '' "$all" &
plant below layout_tile.cuh layout_scatter.cu '__popc(word & ((1u << (row & 31)) - 1))' '__popc(word)' "$all" &
plant tile_before layout_fused.cu layout_fused.cu 'before += t < tile ? n : 0' 'before += t <= tile ? n : 0' "$layout" &
plant tile_scan layout_fused.cu layout_fused.cu 'before += w < warp ? parts[w][lane] : 0' 'before += 0' "$layout" &
plant layout_padding layout_fused.cu layout_fused.cu 'if (a > 1 && e % num_ctas' 'if (false && e % num_ctas' "$layout" &
plant layout_wait layout_fused.cu layout_fused.cu 'counted.arrive(), counted.wait();' 'counted.arrive();' "$layout" &
plant padding layout_scatter.cu layout_scatter.cu 'if (header.S_padded > header.S) write_padding(q, call, static_cast<int>(gridDim.x));' '' "$all" &
plant sum sum_ring.cuh combine_bulk.cu 'd == 0 ? part : sum[i][j] + part' 'd == 0 ? part : part' "$ranks" &
plant ring_weight sum_ring.cuh unpermute_bulk.cu 'kWeighted ? weight * x[j] : x[j]' 'x[j]' "$chunks" &
plant chunk_count exchange_signal.cuh dispatch_bulk.cu 'if (is_last != 0) *done = 0;' '' "$chunks" &
plant chunk_wait combine_parts.cuh reduce_combine.cu 'ok = await_chunk(q_, rank_, kChunkPartials, entry.rank, (entry.row - base_[entry.rank]) >> q_.shape.chunk_shift, epoch_);' 'ok = true;' "$chunks" &
plant chunk_order slot_parts.cuh reduce_combine.cu '(chunk(order) << shift) + (order & ((1 << shift) - 1))' '(order & ((1 << shift) - 1))' "$chunks" &
plant own_rows permute.cu permute.cu 'Rows::kFromX ? entry / shape.D : row' 'Rows::kFromX ? entry : row' "$ranks" &
plant arriving_wait permute.cu permute.cu 'if (num_pieces > 0 && !await_row(q, call, rank, rows, items.row(item), entry)) return;' '' "Ranks/ExchangeTwoGpus.RanksUp*" &
plant node_place node_routes.cu node_routes.cu 'rows + place_of(' 'place_of(' 'Nodes/NodeExchangeCuda.*' &
plant node_trim node_routes.cu node_routes.cu 'const int rows = min(max(received[m].rows, 0), args.T_max);' 'const int rows = args.T_max;' 'Nodes/NodeExchangeCuda.*' &
plant node_sum node_rows.cu node_rows.cu 'is_first ? x[j] : total[j] + x[j]' 'x[j]' 'Nodes/NodeExchangeCuda.*' &
plant node_verdict node_verdict.cu node_verdict.cu 'if (other.valid == 0) merged.valid = merged.R = merged.S = 0;' '' 'Nodes/NodeExchangeCuda.An*' &
plant weight unpermute_reduce.cu unpermute_reduce.cu 'args.weighted != 0 ? weight * x[n] : x[n]' 'x[n]' "$all" &
plant order combine_pull.cu combine_pull.cu 'if (d + 1 < sources.num) add_piece<Wire>(odd, false, sum);' '' "$all" &
plant sum_order sum_ring.cuh combine_bulk.cu '== (c.d & 31)) {' '== ((c.num - 1 - c.d) & 31)) {' "$ranks" &
plant one_over plan_counts.cuh plan_fused_i16.cu 'header.max_slot_demand <= shape.slot_budget' 'header.max_slot_demand <= shape.slot_budget + 1' 'ExchangeBudgetCuda.*' &
plant lost_name exchange_signal.cuh plan_fused_i16.cu 'status.timeout_peer = error.peer' 'status.timeout_peer = error.rank' 'ExchangeLostPeerCuda.*' &
plant rows_wait dispatch_bulk.cu dispatch_bulk.cu 'post_and_await(q, rank, call, kSignalRows);' 'post_only(q, rank, kSignalRows);' "$launches" &
plant partials_wait combine_bulk.cu combine_bulk.cu 'if (await_signal(q, rank, kSignalPartials, partials)) {' 'if (true) {' "$launches" &
plant values slot_values_return.cu slot_values_return.cu 'slot = next[warp][at] + __popc(before);' 'slot = next[warp][at];' "$all" &
wait
! ls "$work"/*/failed >/dev/null 2>&1
