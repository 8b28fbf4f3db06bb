// SPDX-License-Identifier: Apache-2.0
// Sweeps that --tune --parts prints: launches that start early, the ways from x to expert rows, the permute.
#pragma once

#include <fmt/format.h>

#include <string>

#include "bench/cuda/exchange_group.h"

namespace waybill::cuda {

// Puts a group's tuning back.
class SavedTuning {
 public:
  explicit SavedTuning(ExchangeGroup& group) : group_(group), saved_(group.tuning()) {}
  ~SavedTuning() { group_.set_tuning(saved_); }
  SavedTuning(const SavedTuning&) = delete;
  const ExchangeTuning& value() const { return saved_; }

 private:
  ExchangeGroup& group_;
  ExchangeTuning saved_;
};

// The dispatch by CTAs, started beside the end of the kernel before it or behind that.
inline void sweep_early_dispatch(ExchangeGroup& g, const std::string& name) {
  using Part = ExchangeGroup::Part;
  const SavedTuning saved(g);
  const auto time = [&](const ExchangeGroup::Step& step) { return g.time(step, 6, 9).p50; };
  for (const int early : {-1, 1}) {
    std::string line = fmt::format("tune {} dispatch {:<25} | CTAs: given, fresh, gather list |", early > 0 ? "early" : "late ", name);
    for (const int ctas : {12, 14, 16, 18, 20, 24, 32, 48, 64}) {
      ExchangeTuning t = saved.value();
      t.dispatch_ctas = ctas, t.early_dispatch = early, g.set_tuning(t);
      line += fmt::format(" [{}] {:.1f} {:.1f} {:.1f}", ctas, time([&](Part& p, int i, cudaStream_t s) { g.dispatch(p, i, false, s); }),
                          time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s), g.dispatch(p, i, true, s); }),
                          time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s), g.dispatch_and_layout(p, i, s); }));
    }
    fmt::print("{}\n", line);
  }
}

// From x to expert rows: one step after the other, own rows beside the link, in chunks; with the layout in one launch and in three.
inline void sweep_expert_rows(ExchangeGroup& g, const std::string& name) {
  using Part = ExchangeGroup::Part;
  const SavedTuning saved(g);
  const auto time = [&](const ExchangeGroup::Step& step) { return g.time(step, 6, 9).p50; };
  for (const bool fused : {false, true}) {
    ExchangeTuning t = saved.value();
    t.fused_layout = fused, g.set_tuning(t);
    std::string line = fmt::format("tune x to expert rows {:<25} layout in {} | layout {:.1f} plan {:.1f}", name, fused ? "1" : "3",
                                   time([&](Part& p, int, cudaStream_t s) { g.layout(p, s); }), time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s); }));
    for (const int early : {-1, 1}) {
      t.early_dispatch = early, g.set_tuning(t);
      line += fmt::format(" | {} one stream {:.1f} serial {:.1f}", early > 0 ? "early" : "late",
                          time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s), g.layout(p, s), g.dispatch(p, i, true, s), g.permute(p, s); }),
                          time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s), g.dispatch_and_layout(p, i, s), g.permute(p, s); }));
      for (const int ctas : {64, 112}) {
        t.local_ctas = ctas, g.set_tuning(t);
        line += fmt::format(" halves {} {:.1f}", ctas, time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s), g.dispatch_and_permute(p, i, s); }));
      }
      t.local_ctas = 0;
      for (const int dispatch : {14, 20, 24, 32, 40, 48, 64}) {
        t.chunk_ctas = dispatch, g.set_tuning(t);
        line +=
            fmt::format(" chunks {} {:.1f}", dispatch, time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s), g.dispatch_and_permute_chunks(p, i, s); }));
      }
    }
    fmt::print("{}\n", line);
  }
}

// The permute alone: a row in so many items.
inline void sweep_permute(ExchangeGroup& g, const std::string& name) {
  using Part = ExchangeGroup::Part;
  const SavedTuning saved(g);
  const auto time = [&] { return g.time([&](Part& p, int, cudaStream_t s) { g.permute(p, s); }, 6, 9).p50; };
  std::string line = fmt::format("tune permute {:<25} | parts x CTAs:", name);
  ExchangeTuning t = saved.value();
  for (const int ctas : {264, 396, 528}) {
    for (const int parts : {0, 1, 2, 7, 14}) {
      t.permute_parts = parts, t.local_ctas = ctas, g.set_tuning(t);
      line += fmt::format(" [{}x{}] {:.1f}", parts, ctas, time());
    }
  }
  fmt::print("{}\n", line);
}

}  // namespace waybill::cuda
