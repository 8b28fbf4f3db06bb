// SPDX-License-Identifier: Apache-2.0
// Ablation of the exchange and published negative results, in one run: each older design beside ours, results compared first. With two GPUs: one rank on
// each, over their link. With one: two virtual ranks, whose "link" is the GPU's memory; a step is then the work of both ranks.
//   bench_cuda_negative OUT.jsonl [--filter TEXT] [--loads]      --loads: also W0 to W9 of bench/shapes/loads.toml
// ablation: dense map -> compact routes; full probability row -> the weights of a rank's experts; every slot -> set bits -> lists; default -> tuned
// combine. control: sums of a row's slots by atomics instead of in order. negative: one remote payload for every expert; dispatch and permute together; combine
// and unpermute together; pruned dense scan. Method: as bench_cuda_exchange. Older plans are given what ours pay for: no signals between ranks, places of
// direct writes from the host.
#include <cstdlib>

#include "bench/cuda/case_filter.h"
#include "bench/cuda/exchange_record.h"
#include "bench/cuda/run_main.h"
#include "bench/negative/cuda/older_designs.h"

namespace waybill::cuda {
namespace {

using Part = ExchangeGroup::Part;
constexpr int kSteps = 8, kReplays = 30;

std::FILE* g_out = nullptr;
bool g_all_match = true;

class Case {
 public:
  Case(const ExchangeShapeCase& c, const std::vector<int>& devices) : c_(c), name_(name_of(c, devices)), L_(c.E / 2), row_(c.H * 2), group_(c, 2, devices) {
    ok_ = group_.check();
    deliver();
  }
  static std::string name_of(const ExchangeShapeCase& c, const std::vector<int>& devices) {
    return fmt::format("T{} H{} K{} E{}{} {}", c.T, c.H, c.K, c.E, c.load.empty() ? "" : " " + c.load, devices.size() > 1 ? "2 GPUs" : "2 ranks on 1 GPU");
  }
  void run() { plan(), probabilities(), slots(), combines(), atomics(), together(), direct(); }

 private:
  // Rank r is number `index` of `part`.
  struct Seat {
    Part& part;
    std::size_t index;
  };
  Seat seat(std::size_t r) {
    for (auto& p : group_.parts) {
      for (int i = 0; i < p->exchange.num_ranks(); ++i) {
        if (p->exchange.rank(i) == static_cast<int>(r)) return {*p, static_cast<std::size_t>(i)};
      }
    }
    WB_FAIL(ErrorCode::kInternal, "no rank {}", r);
  }
  // call(r, index) for the ranks of a part: the older designs have a launch a rank.
  template <class Call>
  static void each(Part& p, const Call& call) {
    for (int i = 0; i < p.exchange.num_ranks(); ++i) call(static_cast<std::size_t>(p.exchange.rank(i)), static_cast<std::size_t>(i));
  }

  // The first set of routes and rows, planned, delivered and permuted; host_ follows.
  void deliver() {
    group_.run([&](Part& p, int i, cudaStream_t s) { group_.plan(p, i, s), group_.layout(p, s), group_.dispatch(p, i, true, s), group_.permute(p, s); });
    host_.clear();
    for (std::size_t r = 0; r < 2; ++r) {
      const auto [p, i] = seat(r);
      host_.push_back(p.exchange.read(p.handle, static_cast<int>(i), p.stream));
    }
  }
  StepTime time(const ExchangeGroup::Step& step) { return group_.time(step, kSteps, kReplays); }
  void add(const char* op, const std::string& variant, const StepTime& t, bool ok = true) {
    g_all_match &= ok && ok_;
    write_record(g_out, op, name_, variant, t, 0, 0, ok && ok_, kSteps * kReplays);
  }
  // A step whose result nothing compares.
  void add_unchecked(const char* op, const std::string& variant, const StepTime& t) {
    write_record(g_out, op, name_, variant, t, 0, 0, false, kSteps * kReplays, "not compared");
  }
  unsigned char* extra(int rank) const { return static_cast<unsigned char*>(group_.arena().at(rank, group_.extra_window)); }
  static std::vector<std::int32_t> download(const void* from, std::size_t count) {
    std::vector<std::int32_t> values(count);
    WB_TRY_CUDA(cudaMemcpy(values.data(), from, count * 4, cudaMemcpyDefault));
    return values;
  }

  // Dense byte maps against compact routes: what the receiver must know before rows can be used.
  void plan() {
    const auto T = static_cast<std::size_t>(c_.T), E = static_cast<std::size_t>(c_.E), tiles = 2 * T / kMapTile;
    std::vector<DenseMap> maps;
    std::vector<DeviceBuffer> memory;
    for (int r = 0; r < 2; ++r) {
      const auto [p, i] = seat(static_cast<std::size_t>(r));
      const DeviceGuard guard(p.device);
      const std::vector<std::int16_t>& ids = p.host_ids[i];
      std::vector<std::uint8_t> map(T * E);
      for (std::size_t t = 0; t < ids.size() / static_cast<std::size_t>(c_.K); ++t) {  // a load may give the rank fewer than T
        for (std::int64_t k = 0; k < c_.K; ++k)
          map[t * E + static_cast<std::size_t>(ids[t * static_cast<std::size_t>(c_.K) + static_cast<std::size_t>(k)])] = 1;
      }
      const auto buffer = [&memory, device = p.device](std::size_t bytes) -> DeviceBuffer& { return memory.emplace_back(bytes, device); };
      DenseMap m{};
      m.P = 2, m.rank = r, m.T = static_cast<std::int32_t>(c_.T), m.E = static_cast<std::int32_t>(c_.E);
      DeviceBuffer& own = buffer(map.size());
      own.upload(map.data(), map.size());
      m.own = own.as<std::uint8_t>();
      for (int peer = 0; peer < 2; ++peer) m.gathered[peer] = extra(peer);
      m.hits = buffer(2 * T * 4).as<std::uint32_t>(), m.row = buffer(4 * T * 4).as<std::int32_t>();
      m.tile_counts = buffer((static_cast<std::size_t>(L_) * tiles + 4) * 4).as<std::int32_t>();
      m.expert_offsets = buffer((static_cast<std::size_t>(L_) + 1) * 4).as<std::int32_t>();
      m.slot_row = buffer(host_[static_cast<std::size_t>(r)].layout.slot_row.size() * 4).as<std::int32_t>();
      maps.push_back(m);
      WB_TRY_CUDA(cudaDeviceSynchronize());
    }
    const auto push = [&](Part& p, int, cudaStream_t s) { each(p, [&](std::size_t r, std::size_t) { launch_dense_map_push(maps[r], s); }); };
    const auto scan = [&](Part& p, int, cudaStream_t s) { each(p, [&](std::size_t r, std::size_t) { launch_dense_map_plan(maps[r], s); }); };
    group_.run(push);
    group_.run(scan);
    bool same = true;
    for (std::size_t r = 0; r < 2; ++r) {
      same &= download(maps[r].expert_offsets, static_cast<std::size_t>(L_) + 1) == host_[r].layout.expert_offsets;
      same &= download(maps[r].slot_row, host_[r].layout.slot_row.size()) == host_[r].layout.slot_row;
    }
    add("ablation: routes", "dense map: gather", time(push), same);
    add("ablation: routes", "dense map: gather, rows and slots", time([&](Part& p, int i, cudaStream_t s) { push(p, i, s), scan(p, i, s); }), same);
    add("ablation: routes", "compact: plan and layout", time([&](Part& p, int i, cudaStream_t s) { group_.plan(p, i, s), group_.layout(p, s); }));
  }

  // A float for every expert of the group beside each row, against the weights of the destination's experts in the plan.
  void probabilities() {
    std::vector<DeviceBuffer> rows;
    for (std::size_t r = 0; r < 2; ++r) rows.emplace_back(static_cast<std::size_t>(c_.T * c_.E) * 4, seat(r).part.device);
    add("ablation: weights", "full probability row", time([&](Part& p, int i, cudaStream_t s) {
          std::vector<DeviceRows> extra_rows;
          each(p, [&](std::size_t r, std::size_t) { extra_rows.push_back({rows[r].data(), 0}); });
          group_.plan(p, i, s);
          p.exchange.dispatch(p.handle, DType::kBF16, p.x[static_cast<std::size_t>(i % 4)], group_.rows_window, {extra_rows, c_.E * 4, group_.extra_window},
                              true, s);
        }));
    add("ablation: weights", "of the rank's experts", time([&](Part& p, int i, cudaStream_t s) { group_.plan(p, i, s), group_.dispatch(p, i, true, s); }));
  }

  // The slots of a row from a dense map, three ways, and from our lists.
  void slots() {
    deliver();  // what was timed before left other routes in the handles
    std::vector<DeviceBuffer> maps, other;
    for (std::size_t r = 0; r < 2; ++r) {
      const auto [p, i] = seat(r);
      const DeviceGuard guard(p.device);
      const auto R = static_cast<std::size_t>(host_[r].layout.R());
      maps.emplace_back(R * static_cast<std::size_t>(L_) * 4, p.device);
      other.emplace_back(std::max(host_[r].layout.slot_row.size(), R) * static_cast<std::size_t>(row_), p.device);
      launch_slot_map(p.exchange.expert_offsets(p.handle, static_cast<int>(i)), p.exchange.slot_rows(p.handle, static_cast<int>(i)),
                      static_cast<std::int32_t>(R), static_cast<std::int32_t>(L_), maps[r].as<std::int32_t>(), p.stream);
      p.stream.synchronize();
    }
    const auto R_of = [&](std::size_t r) { return static_cast<std::int32_t>(host_[r].layout.R()); };
    const auto L = static_cast<std::int32_t>(L_), row = static_cast<std::int32_t>(row_);
    group_.run([&](Part& p, int, cudaStream_t s) { group_.permute(p, s); });
    const std::pair<SlotVisit, const char*> visits[] = {
        {SlotVisit::kEvery, "map, every slot"}, {SlotVisit::kPruned, "map, pruned by warps"}, {SlotVisit::kSetBits, "map, set bits"}};
    for (const auto& [visit, text] : visits) {
      const auto permute = [&](Part& p, int, cudaStream_t s) {
        each(p,
             [&](std::size_t r, std::size_t i) { launch_map_permute(visit, maps[r].as<std::int32_t>(), R_of(r), L, p.rows[i].data, other[r].data(), row, s); });
      };
      group_.run(permute);
      bool same = true;
      for (std::size_t r = 0; r < 2; ++r) {
        const auto [p, i] = seat(r);
        const DeviceGuard guard(p.device);
        std::vector<unsigned char> a(host_[r].layout.slot_row.size() * static_cast<std::size_t>(row_)), b(a.size());
        WB_TRY_CUDA(cudaMemcpy(a.data(), p.y[i].data, a.size(), cudaMemcpyDefault));
        WB_TRY_CUDA(cudaMemcpy(b.data(), other[r].data(), b.size(), cudaMemcpyDefault));
        same &= a == b;
      }
      add("ablation: permute", text, time(permute), same);
    }
    add("ablation: permute", "lists", time([&](Part& p, int, cudaStream_t s) { group_.permute(p, s); }));
    for (const auto& [visit, text] : visits) {
      add_unchecked("ablation: unpermute", text, time([&](Part& p, int, cudaStream_t s) {
                      each(p, [&](std::size_t r, std::size_t i) {
                        launch_map_unpermute(visit, maps[r].as<std::int32_t>(), R_of(r), L, p.y[i].data, other[r].data(), row, s);
                      });
                    }));
    }
    add("ablation: unpermute", "lists", time([&](Part& p, int, cudaStream_t s) { group_.unpermute(p, s); }));
  }

  void combines() {
    const ExchangeTuning tuned = group_.tuning();
    ExchangeTuning plain = tuned;
    plain.combine = CombinePath::kPull, plain.combine_ctas = 16;
    const auto combine = [&](Part& p, int, cudaStream_t s) { group_.combine(p, s); };
    group_.set_tuning(plain);
    add("ablation: combine", "plain loads, 16 CTAs", time(combine));
    plain.combine_ctas = 32, group_.set_tuning(plain);
    add("ablation: combine", "plain loads, 32 CTAs", time(combine));
    group_.set_tuning(tuned);
    add("ablation: combine", "tuned", time(combine));
  }

  // What the fixed order of sums costs: the same rows by atomics, f32 sums zeroed before and rounded after.
  void atomics() {
    deliver();
    std::vector<DeviceBuffer> sums, z;
    std::vector<AtomicCombine> calls;
    for (std::size_t r = 0; r < 2; ++r) {
      const auto [p, i] = seat(r);
      const DeviceGuard guard(p.device);
      const auto values = static_cast<std::size_t>(host_[r].layout.R() * c_.H);
      sums.emplace_back(std::max<std::size_t>(values * 4, 16), p.device), z.emplace_back(std::max<std::size_t>(values * 2, 16), p.device);
      const int n = static_cast<int>(i);
      calls.push_back({p.exchange.slot_rows(p.handle, n), p.exchange.expert_offsets(p.handle, n) + L_, static_cast<std::int32_t>(host_[r].layout.R()),
                       static_cast<std::int32_t>(c_.H), p.y[i].data, sums[r].as<float>(), z[r].data()});
    }
    const auto by_atomics = [&](Part& p, int, cudaStream_t s) { each(p, [&](std::size_t r, std::size_t) { launch_atomic_combine(calls[r], s); }); };
    group_.run([&](Part& p, int, cudaStream_t s) { group_.unpermute(p, s); });
    group_.run(by_atomics);
    bool close = true;
    for (std::size_t r = 0; r < 2 && group_.parts[0]->exchange.wire() == DType::kBF16; ++r) {
      const auto [p, n] = seat(r);
      const auto values = static_cast<std::size_t>(host_[r].layout.R() * c_.H);
      std::vector<bf16> a(values), b(values);
      WB_TRY_CUDA(cudaMemcpy(a.data(), p.z[n].data, values * 2, cudaMemcpyDefault));
      WB_TRY_CUDA(cudaMemcpy(b.data(), z[r].data(), values * 2, cudaMemcpyDefault));
      for (std::size_t i = 0; i < values; ++i)  // other orders of the sum: a rounding of bf16 apart
        close &= std::abs(static_cast<float>(a[i]) - static_cast<float>(b[i])) <= 0.02f * std::abs(static_cast<float>(a[i])) + 0.02f;
    }
    add("control: order of sums", "in order of the slots", time([&](Part& p, int, cudaStream_t s) { group_.unpermute(p, s); }));
    add("control: order of sums", "by atomics", time(by_atomics), close);
  }

  void together() {
    add("negative: fused", "dispatch, then permute",
        time([&](Part& p, int i, cudaStream_t s) { group_.plan(p, i, s), group_.dispatch_and_layout(p, i, s), group_.permute(p, s); }));
    add("negative: fused", "dispatch and permute in chunks",
        time([&](Part& p, int i, cudaStream_t s) { group_.plan(p, i, s), group_.dispatch_and_permute_chunks(p, i, s); }));
    add("negative: fused", "unpermute, then combine", time([&](Part& p, int, cudaStream_t s) { group_.unpermute(p, s), group_.combine(p, s); }));
    ExchangeTuning t = group_.tuning();
    const ExchangeTuning saved = t;
    t.fused_combine_ctas = 32, group_.set_tuning(t);
    add("negative: fused", "unpermute and combine in one launch", time([&](Part& p, int, cudaStream_t s) { group_.reduce_and_combine(p, s); }));
    group_.set_tuning(saved);
  }

  void direct() {
    std::vector<DeviceBuffer> targets;
    for (std::size_t r = 0; r < 2; ++r) {
      const auto [p, i] = seat(r);
      const std::vector<std::int16_t>& ids = p.host_ids[i];
      std::vector<DirectTarget> target(ids.size());
      for (std::int64_t t = 0; t < static_cast<std::int64_t>(ids.size()) / c_.K; ++t) {
        std::int64_t next[2] = {};
        for (int d = 0; d < 2; ++d) {
          const RowEntry& entry = host_[r].entries[static_cast<std::size_t>(t * 2 + d)];
          if (entry.rank >= 0) next[entry.rank] = entry.slot_begin;
        }
        for (std::int64_t k = 0; k < c_.K; ++k) {
          const auto at = static_cast<std::size_t>(t * c_.K + k);
          const auto rank = static_cast<std::size_t>(ids[at] / L_);
          target[at] = {static_cast<std::int32_t>(rank), static_cast<std::int32_t>(host_[rank].layout.slot_position[static_cast<std::size_t>(next[rank]++)])};
        }
      }
      targets.emplace_back(target.size() * sizeof(DirectTarget), p.device);
      targets.back().upload(target.data(), target.size() * sizeof(DirectTarget));
      WB_TRY_CUDA(cudaDeviceSynchronize());
    }
    for (const int ctas : {24, 132}) {
      const auto write = [&](Part& p, int, cudaStream_t s) {
        each(p, [&](std::size_t r, std::size_t i) {
          const DirectWrite w{static_cast<std::int32_t>(p.host_ids[i].size() / static_cast<std::size_t>(c_.K)),
                              static_cast<std::int32_t>(c_.K),
                              static_cast<std::int32_t>(row_),
                              targets[r].as<DirectTarget>(),
                              {extra(0), extra(1)}};
          launch_direct_write(w, p.x[0][i].data, ctas, s);
        });
      };
      group_.run(write);
      bool same = true;
      group_.run([&](Part& p, int i, cudaStream_t s) { group_.plan(p, i, s), group_.layout(p, s), group_.dispatch(p, i, true, s), group_.permute(p, s); });
      for (std::size_t r = 0; r < 2; ++r) {
        std::vector<unsigned char> a(host_[r].layout.slot_row.size() * static_cast<std::size_t>(row_)), b(a.size());
        const auto [p, i] = seat(r);
        WB_TRY_CUDA(cudaMemcpy(a.data(), p.y[i].data, a.size(), cudaMemcpyDefault));
        WB_TRY_CUDA(cudaMemcpy(b.data(), extra(static_cast<int>(r)), b.size(), cudaMemcpyDefault));
        same &= a == b;
      }
      add("negative: direct write", fmt::format("a payload for each expert, {} CTAs", ctas), time(write), same);
    }
    add("negative: direct write", "rows once a rank, then permute",
        time([&](Part& p, int i, cudaStream_t s) { group_.dispatch(p, i, false, s), group_.permute(p, s); }));
  }

  ExchangeShapeCase c_;
  std::string name_;
  std::int64_t L_, row_;
  ExchangeGroup group_;
  std::vector<HostHandle> host_;
  bool ok_ = false;
};

int main_checked(int argc, char** argv) {
  std::string path = "negative.jsonl";
  CaseFilter filter;
  bool with_loads = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--loads") {
      with_loads = true;
    } else if (argument == "--filter" && i + 1 < argc) {
      filter = CaseFilter(argv[++i]);
    } else {
      WB_CHECK(!argument.starts_with("-"), "unknown option {}, or its value is missing", argument);
      path = argument;
    }
  }
  int count = 0;
  WB_TRY_CUDA(cudaGetDeviceCount(&count));
  const std::vector<int> devices = count > 1 ? std::vector<int>{0, 1} : std::vector<int>{0};
  g_out = std::fopen(path.c_str(), "w");
  WB_CHECK(g_out != nullptr, "cannot write {}", path);
  std::vector<ExchangeShapeCase> cases = {{4096, 7168, 8, 256}, {8192, 512, 36, 2304}};
  for (const char* load : bench::kWorkloads) {
    if (with_loads) cases.push_back({4096, 2048, 8, 128, 0, 1, load});
  }
  for (ExchangeShapeCase& c : cases) {
    // Direct writes: the slots of the fuller rank, all of them under a load; maps and probability rows are smaller.
    c.extra_bytes = static_cast<std::size_t>(c.T * c.K * c.H * 2 + c.T * c.K * c.H / 8) * (c.load.empty() ? 1 : 2);
    if (filter.takes(Case::name_of(c, devices))) Case(c, devices).run();
  }
  std::fclose(g_out);
  filter.check_used();
  return g_all_match ? 0 : 1;
}

}  // namespace
}  // namespace waybill::cuda

int main(int argc, char** argv) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  return waybill::cuda::run_main("bench_cuda_negative", waybill::cuda::main_checked, argc, argv);
}
