// SPDX-License-Identifier: Apache-2.0
// Movement of the dense-map design: rows and probabilities out, sums and gradients home.
#include "baselines/map_rows.h"

#include <algorithm>
#include <cstring>

namespace waybill::baselines {
namespace {

constexpr std::int64_t kGrain = 32;

std::vector<Fabric::Span> spans(const float* data, const std::vector<std::int64_t>& offsets, std::int64_t width) {
  std::vector<Fabric::Span> result;
  for (std::size_t p = 0; p + 1 < offsets.size(); ++p) {
    result.push_back({const_cast<float*>(data) + offsets[p] * width, static_cast<std::size_t>((offsets[p + 1] - offsets[p]) * width) * sizeof(float)});
  }
  return result;
}

}  // namespace

std::int64_t MapRows::rows_to_others() const {
  const auto me = static_cast<std::size_t>(ep_.rank());
  return send_offsets_.back() - (send_offsets_[me + 1] - send_offsets_[me]);
}

void MapRows::send_rows(const float* packed, float* received, std::int64_t width, const char* phase) {
  ep_.all_to_all(spans(packed, send_offsets_, width), spans(received, receive_offsets_, width), phase);
}

void MapRows::return_rows(const float* mine, float* returned, std::int64_t width, const char* phase) {
  ep_.all_to_all(spans(mine, receive_offsets_, width), spans(returned, send_offsets_, width), phase);
}

template <class Body>
void MapRows::for_each_slot(std::int64_t r, const Body& body) const {
  if (changes_.row_lists) {
    for (auto i = static_cast<std::size_t>(row_slot_offsets_[static_cast<std::size_t>(r)]);
         i < static_cast<std::size_t>(row_slot_offsets_[static_cast<std::size_t>(r) + 1]); ++i) {
      body(row_slot_[i], row_expert_[i]);
    }
    return;
  }
  const std::int32_t* positions = slot_map_.data() + r * L_;
  for (std::int64_t l = 0; l < L_; ++l) {
    if (positions[l] >= 0) body(positions[l], l);
  }
}

void MapRows::dispatch(const TensorView& x, Tensor& rows, MoeStackCounters& counters, PhaseTimes* times) {
  const PhaseScope scope(times, Phase::kDispatch);
  const std::int64_t H = x.shape[1];
  const float* source = x.as<float>();
  packed_.resize(static_cast<std::size_t>(send_offsets_.back() * H));
  parallel_for(stream_.pool, send_offsets_.back(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      std::memcpy(packed_.data() + i * H, source + send_token_[static_cast<std::size_t>(i)] * H, static_cast<std::size_t>(H) * sizeof(float));
    }
  });
  rows.resize(DType::kF32, {R(), H});
  send_rows(packed_.data(), rows.as<float>(), H, "map rows");
  counters.bytes.payload += rows_to_others() * H * 4;
}

void MapRows::dispatch_probabilities(MoeStackCounters& counters, PhaseTimes* times) {
  const PhaseScope scope(times, Phase::kDispatch);
  const std::int64_t width = probability_width();
  packed_.assign(static_cast<std::size_t>(send_offsets_.back() * width), 0.0f);
  for (int p = 0; p < ep_.size(); ++p) {
    for (std::int64_t i = send_offsets_[static_cast<std::size_t>(p)]; i < send_offsets_[static_cast<std::size_t>(p) + 1]; ++i) {
      const std::int64_t t = send_token_[static_cast<std::size_t>(i)];
      for (std::int64_t k = 0; k < K_; ++k) {
        const auto slot = static_cast<std::size_t>(t * K_ + k);
        const std::int64_t column = changes_.local_slice ? ids_[slot] - p * L_ : ids_[slot];
        if (ids_[slot] >= 0 && column >= 0 && column < width) packed_[static_cast<std::size_t>(i * width + column)] = weights_[slot];
      }
    }
  }
  counters.slots_visited += send_offsets_.back() * K_;
  parts_.resize(static_cast<std::size_t>(R() * width));
  send_rows(packed_.data(), parts_.data(), width, "map probabilities");
  counters.bytes.weights += rows_to_others() * width * 4;
  slot_weight_.resize(static_cast<std::size_t>(S()));
  const float* mine = parts_.data() + probability_begin(ep_.rank());
  for (std::int64_t r = 0; r < R(); ++r) {
    for_each_slot(r, [&](std::int32_t position, std::int64_t l) { slot_weight_[static_cast<std::size_t>(position)] = mine[r * width + l]; });
  }
  counters.slots_visited += visits();
}

void MapRows::permute(const TensorView& rows, const TensorView& slots, MoeStackCounters& counters, PhaseTimes* times) {
  const PhaseScope scope(times, Phase::kDispatch);
  const std::int64_t H = rows.shape[1];
  const float* source = rows.as<float>();
  float* target = slots.as<float>();
  parallel_for(stream_.pool, R(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      for_each_slot(
          r, [&](std::int32_t position, std::int64_t) { std::memcpy(target + position * H, source + r * H, static_cast<std::size_t>(H) * sizeof(float)); });
    }
  });
  counters.slots_visited += visits();
}

void MapRows::reduce(const TensorView& slots, const TensorView& z, MoeStackCounters& counters, PhaseTimes* times) {
  const PhaseScope scope(times, Phase::kCombine);
  const std::int64_t H = z.shape[1];
  const float* source = slots.as<float>();
  float* target = z.as<float>();
  parallel_for(stream_.pool, R(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      float* sum = target + r * H;
      bool first = true;
      for_each_slot(r, [&](std::int32_t position, std::int64_t) {
        const float* row = source + position * H;
        if (first) std::memcpy(sum, row, static_cast<std::size_t>(H) * sizeof(float));
        for (std::int64_t h = 0; !first && h < H; ++h) sum[h] += row[h];
        first = false;
      });
    }
  });
  counters.slots_visited += visits();
}

void MapRows::combine(const TensorView& z, const TensorView& out, MoeStackCounters& counters, PhaseTimes* times) {
  const PhaseScope scope(times, Phase::kCombine);
  const std::int64_t H = z.shape[1];
  const auto me = static_cast<std::size_t>(ep_.rank());
  parts_.resize(static_cast<std::size_t>(send_offsets_.back() * H));
  return_rows(z.as<float>(), parts_.data(), H, "map results");
  counters.bytes.combined += (R() - (receive_offsets_[me + 1] - receive_offsets_[me])) * H * 4;
  float* sums = out.as<float>();
  std::fill_n(sums, out.size(), 0.0f);
  for (std::size_t i = 0; i < send_token_.size(); ++i) {
    float* sum = sums + send_token_[i] * H;
    const float* row = parts_.data() + static_cast<std::int64_t>(i) * H;
    for (std::int64_t h = 0; h < H; ++h) sum[h] += row[h];
  }
}

void MapRows::return_weights(const float* d_slot, float* d_weights, MoeStackCounters& counters, PhaseTimes* times) {
  const PhaseScope scope(times, Phase::kCombine);
  const std::int64_t width = probability_width();
  const auto me = static_cast<std::size_t>(ep_.rank());
  packed_.assign(static_cast<std::size_t>(R() * width), 0.0f);
  float* mine = packed_.data() + probability_begin(ep_.rank());
  for (std::int64_t r = 0; r < R(); ++r) {
    for_each_slot(r, [&](std::int32_t position, std::int64_t l) { mine[r * width + l] = d_slot[position]; });
  }
  parts_.resize(static_cast<std::size_t>(send_offsets_.back() * width));
  return_rows(packed_.data(), parts_.data(), width, "map weight gradients");
  counters.bytes.weights += (R() - (receive_offsets_[me + 1] - receive_offsets_[me])) * width * 4;
  std::fill_n(d_weights, T_ * K_, 0.0f);
  for (int p = 0; p < ep_.size(); ++p) {
    for (std::int64_t i = send_offsets_[static_cast<std::size_t>(p)]; i < send_offsets_[static_cast<std::size_t>(p) + 1]; ++i) {
      const std::int64_t t = send_token_[static_cast<std::size_t>(i)];
      for (std::int64_t k = 0; k < K_; ++k) {
        const std::int64_t id = ids_[static_cast<std::size_t>(t * K_ + k)], local = id - p * L_;
        if (id >= 0 && local >= 0 && local < L_) d_weights[t * K_ + k] = parts_[static_cast<std::size_t>(i * width + probability_begin(p) + local)];
      }
    }
  }
  counters.slots_visited += visits() + send_offsets_.back() * K_;
}

}  // namespace waybill::baselines
