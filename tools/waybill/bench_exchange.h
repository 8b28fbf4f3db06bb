// SPDX-License-Identifier: Apache-2.0
// What `waybill bench exchange` measures on a rank, and its search for a table of tuning.
#pragma once

#include <string>
#include <vector>

#include "bench_record.h"
#include "waybill/exchange.h"
#include "waybill/fabric.h"

namespace waybill::cli {

// What one rank needs for a round trip with identity experts.
class RoundTrip {
 public:
  RoundTrip(const BenchShape& shape, const Route& route, DType dtype, Fabric& fabric, ThreadPool* pool)
      : route_(route),
        pool_(pool),
        exchange_(config_of(shape), block_placement(shape.E, shape.P), fabric, pool),
        x_(dtype, {route.T(), shape.H}),
        out_(DType::kF32, {route.T(), shape.H}) {
    // Integers up to 15: exact in bf16, and in sums over up to 17 experts.
    for (std::int64_t i = 0; i < x_.size(); ++i) store(i, static_cast<float>(i % 31) - 15.0f);
    plan();
    allocate();
  }
  void plan() { handle_ = exchange_.plan(route_); }
  void dispatch() { exchange_.dispatch(handle_, x_, rows_); }
  void permute_rows() { permute(handle_.layout, rows_, y_, Stream::cpu(pool_)); }
  void reduce() { unpermute_reduce(handle_.layout, y_, true, z_, Stream::cpu(pool_)); }
  void combine() { exchange_.combine(handle_, z_, out_); }
  void all() {
    plan();
    dispatch();
    permute_rows();
    reduce();
    combine();
  }
  // combine(dispatch(x)) must be (number of routes) * x, to the bit.
  void check() {
    all();
    const std::int64_t H = x_.dim(1);
    for (std::int64_t t = 0; t < route_.T(); ++t) {
      int routes = 0;
      for (std::int64_t k = 0; k < route_.K(); ++k) routes += route_.view().id(t, k) >= 0 ? 1 : 0;
      for (std::int64_t h = 0; h < H; ++h) {
        const float wanted = static_cast<float>(routes) * (static_cast<float>((t * H + h) % 31) - 15.0f), seen = out_.as<float>()[t * H + h];
        WB_CHECK(seen == wanted, "token {}, column {}: {} where {} was expected", t, h, seen, wanted);
      }
    }
  }
  ExchangeBytes bytes_of_one() {
    exchange_.reset_bytes();
    all();
    return exchange_.bytes();
  }

 private:
  static ExchangeConfig config_of(const BenchShape& shape) {
    ExchangeConfig config;
    config.H = shape.H;
    config.E = shape.E;
    config.K = shape.K;
    return config;
  }
  void store(std::int64_t i, float value) {
    if (x_.view().dtype == DType::kF32) {
      x_.as<float>()[i] = value;
    } else {
      x_.as<bf16>()[i] = bf16(value);
    }
  }
  void allocate() {
    const std::int64_t H = x_.dim(1);
    y_ = Tensor(x_.view().dtype, {handle_.layout.S_padded(), H});
    z_ = Tensor(DType::kF32, {handle_.layout.R(), H});
  }

  const Route& route_;
  ThreadPool* pool_;
  Exchange exchange_;
  DispatchHandle handle_;
  Tensor x_, out_, rows_, y_, z_;
};

inline DType row_dtype(const BenchOptions& options) { return options.dtype == "bf16" ? DType::kBF16 : DType::kF32; }

// The load's routes with weight 1.
inline std::vector<Route> unit_routes(const BenchOptions& options, const BenchShape& shape) {
  std::vector<Route> routes = make_load(options, shape);
  for (Route& route : routes) {
    for (std::int64_t i = 0; i < route.T() * route.K(); ++i) route.view().weights[i] = route.view().id(i / route.K(), i % route.K()) >= 0 ? 1.0f : 0.0f;
  }
  return routes;
}

// Searches on options.device and writes `file`: the lines of that device; a file that is there keeps those of the other. kIo: it cannot be written.
void tune_exchange(const BenchOptions& options, const std::string& file);
// Table of GPU rows with one searched for this shape. kUnsupported without CUDA kernels or a GPU.
std::string tuned_gpu_rows(const BenchShape& shape, const std::string& old_rows, BenchReport& report, const BenchRecord& record);

}  // namespace waybill::cli
