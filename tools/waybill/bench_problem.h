// SPDX-License-Identifier: Apache-2.0
// What to measure: a shape (from bench/shapes/*.toml or the command line), a load, and how long.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "waybill/router.h"

namespace waybill::cli {

struct BenchShape {
  std::string name = "custom";
  std::int64_t E = 0, K = 0, H = 0, F = 0, T = 0;
  std::int64_t latent = 0;  // of the rows that experts see; 0: H
  int P = 1;
  RouterConfig router{};  // E and K included
};

// bench/shapes/NAME in the working tree, or beside an installed command; `option` is what a person gives instead.
std::string shared_file(const std::string& name, const std::string& option);

// Shapes of a TOML file; unknown keys and missing sizes are refused with file and name.
std::vector<BenchShape> load_shapes(const std::string& path);

struct BenchOptions {
  std::string shape = "small", shapes_file, load = "balanced", loads_file, json, dtype = "fp32", pass = "all", device = "cpu";
  std::int64_t E = 0, K = 0, H = 0, F = 0, T = 0;  // 0 = the shape's
  int P = 0, threads = 0;
  std::uint64_t seed = 1;
  double seconds = 0.5;          // least time a measurement takes
  std::int64_t iterations = 20;  // least number of timed calls
  std::string save_route;
  bool no_check = false;

  BenchShape resolve() const;
};

// Options that every `waybill bench` verb has.
void add_common_options(CLI::App& command, BenchOptions& options);

}  // namespace waybill::cli
