// SPDX-License-Identifier: Apache-2.0
#include "bench/cuda/moe/problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <numeric>
#include <random>

#include "core/cuda/cuda_error.h"
#include "cuda/device_random.h"
#include "waybill/route_io.h"
#include "waybill/workload.h"

namespace waybill::cuda::moe_bench {
namespace {

std::string trimmed(const std::string& text) {
  const auto from = text.find_first_not_of(" \t\""), to = text.find_last_not_of(" \t\"\r");
  return from == std::string::npos ? std::string() : text.substr(from, to - from + 1);
}

TensorView tensor(RankTensors& t, DType dtype, std::initializer_list<std::int64_t> shape) {
  TensorView view(nullptr, dtype, shape, Device{DeviceType::kCuda, t.device});
  t.memory.emplace_back(std::max<std::size_t>(static_cast<std::size_t>(view.size()) * size_bytes(dtype), 16), t.device);
  view.data = t.memory.back().data();
  return view;
}

// Rows of length 1: every expert's logits have the same spread.
std::vector<std::uint16_t> unit_rows(std::int64_t E, std::int64_t H) {
  std::vector<std::uint16_t> gate(static_cast<std::size_t>(E * H));
  std::vector<float> row(static_cast<std::size_t>(H));
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  for (std::int64_t e = 0; e < E; ++e) {
    double length = 0;
    for (float& v : row) v = normal(random), length += static_cast<double>(v) * static_cast<double>(v);
    const auto scale = static_cast<float>(1.0 / std::sqrt(length));
    for (std::int64_t h = 0; h < H; ++h) gate[static_cast<std::size_t>(e * H + h)] = bf16::from_float(row[static_cast<std::size_t>(h)] * scale);
  }
  return gate;
}

// The load's routes, one a rank; empty on the natural load.
std::vector<Route> routes_of(const std::string& load, const Shape& shape, int P) {
  if (load == "natural") return {};
  if (is_recorded(load)) {
    std::vector<Route> routes = split_routes(load_routes(recorded_folder(load)), P);
    WB_CHECK(routes[0].E() == shape.E && routes[0].K() == shape.K, "{} has E = {}, K = {}, the shape {} has E = {}, K = {}", load, routes[0].E(), routes[0].K(),
             shape.name, shape.E, shape.K);
    return routes;
  }
  WorkloadConfig config;
  config.workload = parse_workload(load), config.E = shape.E, config.K = shape.K;
  config.T = config.workload == Workload::kFewRows ? few_rows_tokens(shape.E, shape.K) : shape.T * P;
  return workload_routes(config, P);
}

}  // namespace

std::vector<Shape> read_shapes(const std::string& path) {
  std::ifstream file(path);
  WB_CHECK(file.good(), "cannot read {}", path);
  std::vector<Shape> shapes;
  for (std::string line; std::getline(file, line);) {
    if (trimmed(line) == "[[shape]]") {
      shapes.emplace_back();
      continue;
    }
    const auto equals = line.find('=');
    if (shapes.empty() || equals == std::string::npos || trimmed(line)[0] == '#') continue;
    const std::string key = trimmed(line.substr(0, equals)), value = trimmed(line.substr(equals + 1));
    Shape& s = shapes.back();
    if (key == "name") s.name = value;
    const std::pair<const char*, std::int64_t*> sizes[] = {{"T", &s.T}, {"H", &s.H}, {"F", &s.F}, {"E", &s.E}, {"K", &s.K}, {"latent", &s.latent}};
    for (const auto& [name, size] : sizes) {
      if (key == name) *size = std::stoll(value);
    }
  }
  return shapes;
}

std::string Shape::label() const { return fmt::format("{} T{} H{} F{} E{} K{}{}", name, T, H, F, E, K, latent > 0 ? fmt::format(" latent {}", latent) : ""); }

Problem::Problem(const Shape& shape, int P, const std::vector<int>& devices, const std::string& load, bool f32_gradients)
    : shape_(shape), P_(P), devices_(devices), load_(load) {
  WB_CHECK(shape.E % P == 0, "E = {} is not divisible by P = {}", shape.E, P);
  const std::vector<Route> routes = routes_of(load, shape, P);
  const std::vector<std::uint16_t> gate = unit_rows(shape.E, shape.H);
  for (int r = 0; r < P; ++r) {
    auto t = std::make_unique<RankTensors>();
    t->rank = r, t->device = devices[static_cast<std::size_t>(r) * devices.size() / static_cast<std::size_t>(P)];
    t->T = routes.empty() ? shape.T : routes[static_cast<std::size_t>(r)].T();
    T_max_ = std::max(T_max_, t->T);
    const DeviceGuard guard(t->device);
    fill_rank(*t, f32_gradients);
    WB_TRY_CUDA(cudaMemcpy(t->weights.gate.data, gate.data(), gate.size() * 2, cudaMemcpyHostToDevice));
    if (!routes.empty()) {
      const RouteView& route = routes[static_cast<std::size_t>(r)].view();
      counts_.resize(static_cast<std::size_t>(shape.E));
      for (std::int64_t i = 0; i < route.T * route.K; ++i) {
        const std::int32_t id = route.id(i / route.K, i % route.K);
        if (id >= 0) ++counts_[static_cast<std::size_t>(id)];
      }
      t->ids = tensor(*t, route.id_dtype, {t->T, shape.K});
      WB_TRY_CUDA(cudaMemcpy(t->ids.data, route.ids, static_cast<std::size_t>(t->T * shape.K) * size_bytes(route.id_dtype), cudaMemcpyHostToDevice));
    }
    WB_TRY_CUDA(cudaDeviceSynchronize());
    ranks_.push_back(std::move(t));
  }
}

void Problem::fill_rank(RankTensors& t, bool f32_gradients) {
  const std::int64_t T = t.T, H = shape_.H, W = shape_.row_width(), F = shape_.F, E = shape_.E, local = L();
  const DType wide = f32_gradients ? DType::kF32 : DType::kBF16;
  for (TensorView* view : {&t.x, &t.d_out, &t.out, &t.dx}) *view = tensor(t, DType::kBF16, {T, H});
  t.weights.gate = tensor(t, DType::kBF16, {E, H}), t.gradients.gate = tensor(t, DType::kF32, {E, H});
  t.weights.w1 = tensor(t, DType::kBF16, {local, 2 * F, W}), t.gradients.w1 = tensor(t, wide, {local, 2 * F, W});
  t.weights.w2 = tensor(t, DType::kBF16, {local, W, F}), t.gradients.w2 = tensor(t, wide, {local, W, F});
  const auto normal = [&](const TensorView& view, int seed, double scale) {
    fill_normal(view.data, DType::kBF16, static_cast<std::size_t>(view.size()), static_cast<std::uint64_t>(seed * 64 + t.rank), static_cast<float>(scale),
                nullptr);
  };
  normal(t.x, 1, 1), normal(t.d_out, 2, 1);
  normal(t.weights.w1, 3, 1 / std::sqrt(static_cast<double>(W))), normal(t.weights.w2, 4, 1 / std::sqrt(static_cast<double>(F)));
  if (shape_.latent == 0) return;
  t.weights.latent_down = tensor(t, DType::kBF16, {W, H}), t.gradients.latent_down = tensor(t, wide, {W, H});
  t.weights.latent_up = tensor(t, DType::kBF16, {H, W}), t.gradients.latent_up = tensor(t, wide, {H, W});
  normal(t.weights.latent_down, 5, 1 / std::sqrt(static_cast<double>(H))), normal(t.weights.latent_up, 6, 1 / std::sqrt(static_cast<double>(W)));
}

std::vector<RankTensors*> Problem::on(int device) {
  std::vector<RankTensors*> list;
  for (const auto& t : ranks_) {
    if (t->device == device) list.push_back(t.get());
  }
  return list;
}

RouterConfig Problem::router() const {
  RouterConfig config;
  config.E = shape_.E, config.K = shape_.K, config.score = ScoreFunction::kSigmoid;
  return config;
}

MoeConfig Problem::layer_config(double receive_factor) const {
  MoeConfig c;
  c.H = shape_.H, c.F = shape_.F, c.E = shape_.E, c.K = shape_.K, c.router = router(), c.latent = shape_.latent;
  c.T_max = T_max_, c.mode = ExchangeMode::kCaptured, c.receive_factor = receive_factor;
  c.combine_wire = CombineWire::kBF16, c.recipe.kind = Recipe::kBF16;
  return c;
}

std::size_t Problem::activation_bytes() const {
  std::size_t most = 0;
  for (const int device : devices_) {
    std::int64_t tokens = 0;
    for (const auto& t : ranks_) tokens += t->device == device ? t->T : 0;
    most = std::max(most, static_cast<std::size_t>(4 * tokens * shape_.H * 2));
  }
  return most;
}

std::string Problem::evidence() const {
  if (P_ == 1) return "MoE module, one rank: nothing is exchanged";
  if (ranks_per_gpu() > 1)
    return fmt::format("MoE module, {} virtual ranks on {}: no link in use within a GPU", P_,
                       devices_.size() == 1 ? "one GPU" : fmt::format("{} GPUs", devices_.size()));
  return "MoE module";
}

std::int64_t Problem::routes() const { return std::accumulate(counts_.begin(), counts_.end(), std::int64_t{0}); }
std::int64_t Problem::rows_of_rank(int r) const { return std::accumulate(counts_.begin() + r * L(), counts_.begin() + (r + 1) * L(), std::int64_t{0}); }
std::int64_t Problem::longest_expert(int r) const { return *std::max_element(counts_.begin() + r * L(), counts_.begin() + (r + 1) * L()); }
std::int64_t Problem::hottest_rank_rows() const {
  std::int64_t most = 0;
  for (int r = 0; r < P_; ++r) most = std::max(most, rows_of_rank(r));
  return most;
}

}  // namespace waybill::cuda::moe_bench
