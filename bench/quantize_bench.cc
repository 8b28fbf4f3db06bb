// SPDX-License-Identifier: Apache-2.0
// quantize_dequantize() of the recipes' operands on one thread: elements and bytes (4 read, 4 written) a second, per implementation, beside a
// copy of the same bytes, which is the floor. The arguments in a name are rows and columns; the first size stays in the second-level cache. load:W0 to load:W9:
// blocks of columns restart at each of 64 groups of the loads of bench/shapes/loads.toml, 128 rows on average.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "bench/loads.h"
#include "ops/quantize/qdq_kernels.h"
#include "waybill/random.h"
#include "waybill/recipe.h"

namespace waybill {
namespace {

Tensor random_matrix(std::int64_t rows, std::int64_t columns) {
  Tensor x(DType::kF32, {rows, columns});
  for (std::int64_t i = 0; i < x.size(); ++i) x.as<float>()[i] = random_uniform(3, static_cast<std::uint64_t>(i)) - 0.5f;
  return x;
}

void report(benchmark::State& state, std::int64_t elements) {
  state.SetItemsProcessed(state.iterations() * elements);
  state.SetBytesProcessed(state.iterations() * elements * 8);
}

void copy(benchmark::State& state) {
  const Tensor x = random_matrix(state.range(0), state.range(1)), y(DType::kF32, {state.range(0), state.range(1)});
  for (auto _ : state) {
    std::memcpy(y.as<float>(), x.as<float>(), static_cast<std::size_t>(x.size()) * sizeof(float));
    benchmark::ClobberMemory();
  }
  report(state, x.size());
}

void rounded(benchmark::State& state, const std::string& set, const QuantConfig& format) {
  detail::force_quantize(set.c_str());
  const Tensor x = random_matrix(state.range(0), state.range(1)), y(DType::kF32, {state.range(0), state.range(1)});
  for (auto _ : state) {
    quantize_dequantize(format, {x, {}, {}, y});
    benchmark::ClobberMemory();
  }
  report(state, x.size());
  detail::force_quantize("");
}

void grouped(benchmark::State& state, const QuantConfig& format, const std::string& load) {
  const std::vector<std::int32_t> firsts = bench::load_offsets(load, 64, 128);
  const Tensor x = random_matrix(firsts.back(), state.range(0)), y(DType::kF32, {firsts.back(), state.range(0)});
  const Tensor offsets(DType::kI32, {static_cast<std::int64_t>(firsts.size())});
  std::copy(firsts.begin(), firsts.end(), offsets.as<std::int32_t>());
  for (auto _ : state) {
    quantize_dequantize(format, {x, {}, offsets, y});
    benchmark::ClobberMemory();
  }
  report(state, x.size());
}

void to_bf16(benchmark::State& state, const std::string& set) {
  detail::force_quantize(set.c_str());
  const Tensor x = random_matrix(state.range(0), state.range(1)), y(DType::kBF16, {state.range(0), state.range(1)});
  for (auto _ : state) {
    round_to_bf16(x, y);
    benchmark::ClobberMemory();
  }
  report(state, x.size());
  detail::force_quantize("");
}

void sizes(benchmark::internal::Benchmark* benchmark) { benchmark->Args({512, 128})->Args({8192, 2048})->Unit(benchmark::kMicrosecond); }

void add_set(const std::string& set) {
  const auto add = [&](const std::string& name, const RecipeConfig& recipe, Operand operand, Contraction contraction) {
    const QuantConfig format = operand_format(recipe, operand, contraction);
    benchmark::RegisterBenchmark((name + "/" + set).c_str(), [set, format](benchmark::State& state) { rounded(state, set, format); })->Apply(sizes);
  };
  benchmark::RegisterBenchmark(("bf16/" + set).c_str(), [set](benchmark::State& state) { to_bf16(state, set); })->Apply(sizes);
  for (const Recipe kind : {Recipe::kFP8, Recipe::kMXFP8, Recipe::kNVFP4}) {
    RecipeConfig recipe;
    recipe.kind = kind;
    const std::string name = to_string(kind);
    add(name + " rows", recipe, Operand::kActivation, Contraction::kColumns);
    add(name + " columns", recipe, Operand::kActivation, Contraction::kRows);
    add(name + " weights", recipe, Operand::kWeight, Contraction::kColumns);
    if (kind == Recipe::kNVFP4) add(name + " gradient rows", recipe, Operand::kGradient, Contraction::kColumns);
    if (kind == Recipe::kNVFP4) add(name + " gradient columns", recipe, Operand::kGradient, Contraction::kRows);
  }
}

void add_loads() {
  for (const Recipe kind : {Recipe::kFP8, Recipe::kMXFP8, Recipe::kNVFP4}) {
    RecipeConfig recipe;
    recipe.kind = kind;
    const QuantConfig format = operand_format(recipe, Operand::kActivation, Contraction::kRows);
    for (const char* load : bench::kWorkloads) {
      const std::string name = std::string(to_string(kind)) + " columns/load:" + load;
      benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) { grouped(state, format, load); })->Arg(512)->Unit(benchmark::kMicrosecond);
    }
  }
}

}  // namespace
}  // namespace waybill

int main(int argc, char** argv) {
  benchmark::RegisterBenchmark("copy", waybill::copy)->Apply(waybill::sizes);
  const waybill::detail::QdqKernelList& list = waybill::detail::usable_qdq_kernels();
  for (int i = 0; i < list.count; ++i) waybill::add_set(list.sets[i]->name);
  waybill::add_set("ref");
  waybill::add_loads();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  return benchmark::RunSpecifiedBenchmarks() > 0 ? 0 : 2;  // 0: the filter matches nothing
}
