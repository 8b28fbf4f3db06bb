// SPDX-License-Identifier: Apache-2.0
#include "bench_problem.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <toml++/toml.h>

#include <algorithm>
#include <filesystem>

#include "arguments.h"
#include "bench_loads.h"
#include "waybill/error.h"

namespace waybill::cli {
namespace {

constexpr const char* kKeys[] = {"name", "E", "K", "H", "F", "T", "P", "latent", "score", "renormalise", "scaling_factor", "num_groups", "num_kept_groups"};

ScoreFunction score_of(const std::string& name, const std::string& where) {
  if (name == "softmax") return ScoreFunction::kSoftmax;
  if (name == "softmax_selected") return ScoreFunction::kSoftmaxSelected;
  if (name == "sigmoid") return ScoreFunction::kSigmoid;
  if (name == "sqrt_softplus") return ScoreFunction::kSqrtSoftplus;
  WB_FAIL(ErrorCode::kInvalidArgument, "{}: score is '{}', allowed are softmax, softmax_selected, sigmoid, sqrt_softplus", where, name);
}

BenchShape read_shape(const toml::table& table, const std::string& path) {
  BenchShape shape;
  shape.name = table["name"].value_or(std::string());
  WB_CHECK(!shape.name.empty(), "{}: a shape without a name", path);
  const std::string where = path + ": shape " + shape.name;
  for (const auto& [key, value] : table) {
    const std::string_view name = key.str();
    WB_CHECK(std::find(std::begin(kKeys), std::end(kKeys), name) != std::end(kKeys), "{}: unknown key '{}', known are {}", where, name, fmt::join(kKeys, ", "));
  }
  const auto size = [&](const char* key) {
    const std::int64_t value = table[key].value_or(std::int64_t{0});
    WB_CHECK(value >= 1, "{}: {} is {}, it must be given and positive", where, key, value);
    return value;
  };
  shape.E = shape.router.E = size("E");
  shape.K = shape.router.K = size("K");
  shape.H = size("H");
  shape.F = size("F");
  shape.T = size("T");
  shape.latent = table["latent"].value_or(std::int64_t{0});
  shape.P = static_cast<int>(size("P"));
  shape.router.score = score_of(table["score"].value_or(std::string("softmax")), where);
  shape.router.renormalise = table["renormalise"].value_or(true);
  shape.router.scaling_factor = static_cast<float>(table["scaling_factor"].value_or(1.0));
  shape.router.num_groups = table["num_groups"].value_or(std::int64_t{1});
  shape.router.num_kept_groups = table["num_kept_groups"].value_or(std::int64_t{1});
  return shape;
}

}  // namespace

std::string shared_file(const std::string& name, const std::string& option) {
  std::error_code error;
  const auto command = std::filesystem::read_symlink("/proc/self/exe", error);
  std::vector<std::filesystem::path> places = {"bench/shapes/" + name};
  for (auto folder = command.parent_path(); !error && folder.has_relative_path(); folder = folder.parent_path()) {
    places.push_back(folder / "share/waybill/shapes" / name);
    places.push_back(folder / "bench/shapes" / name);
  }
  for (const auto& place : places) {
    if (std::filesystem::is_regular_file(place, error)) return place.string();
  }
  WB_FAIL(ErrorCode::kIo, "bench/shapes/{} was found neither here nor beside the command; give {} FILE", name, option);
}

std::vector<BenchShape> load_shapes(const std::string& path) {
  toml::table file;
  try {
    file = toml::parse_file(path);
  } catch (const toml::parse_error& error) {
    WB_FAIL(ErrorCode::kIo, "{}:{}: {}", path, error.source().begin.line, error.description());
  }
  const toml::array* list = file["shape"].as_array();
  WB_CHECK(list != nullptr && !list->empty(), "{}: no [[shape]]", path);
  std::vector<BenchShape> shapes;
  for (const toml::node& node : *list) {
    WB_CHECK(node.is_table(), "{}: [[shape]] must be a table", path);
    shapes.push_back(read_shape(*node.as_table(), path));
  }
  return shapes;
}

BenchShape BenchOptions::resolve() const {
  check_writable(json, "--json");  // before anything is measured
  check_writable(save_route, "--save-route");
  const std::string path = shapes_file.empty() ? shared_file("moe.toml", "--shapes") : shapes_file;
  BenchShape result;
  std::vector<std::string> names;
  for (const BenchShape& candidate : load_shapes(path)) {
    names.push_back(candidate.name);
    if (candidate.name == shape) result = candidate;
  }
  WB_CHECK(result.E > 0, "no shape '{}' in {}, known are {}", shape, path, fmt::join(names, ", "));
  WB_CHECK(result.latent == 0, "the shape {} has a latent width ({}): it is for `waybill bench moe --device cuda`", shape, result.latent);
  const auto replace = [](auto& target, auto value) {
    if (value > 0) target = static_cast<std::decay_t<decltype(target)>>(value);
  };
  replace(result.E, E);
  replace(result.K, K);
  replace(result.H, H);
  replace(result.F, F);
  replace(result.T, T);
  replace(result.P, P);
  if (is_recorded(load)) {  // E, K and the tokens are the recording's
    const std::vector<Route> routes = load_recorded(load);
    std::int64_t tokens = 0;
    for (const Route& route : routes) tokens += route.T();
    WB_CHECK((E == 0 || E == routes[0].E()) && (K == 0 || K == routes[0].K()) && T == 0, "{} has E = {}, K = {} and {} tokens: E, K and T cannot be given",
             load, routes[0].E(), routes[0].K(), tokens);
    result.E = routes[0].E();
    result.K = routes[0].K();
    if (P == 0) result.P = static_cast<int>(routes.size());
    result.T = (tokens + result.P - 1) / result.P;
    result.router.num_groups = result.router.num_kept_groups = 1;
  }
  if (E > 0 && result.router.num_groups > 1) result.router.num_groups = result.router.num_kept_groups = 1;
  result.router.E = result.E;
  result.router.K = result.K;
  validate(result.router);
  WB_CHECK(result.E % result.P == 0, "E = {} is not divisible by P = {}", result.E, result.P);
  return result;
}

void add_common_options(CLI::App& command, BenchOptions& options) {
  command.add_option("--shape", options.shape, "name of a shape in the shapes file")->capture_default_str();
  command.add_option("--shapes", options.shapes_file, "TOML file of shapes (default: bench/shapes/moe.toml)");
  command.add_option("-T,--tokens", options.T, "tokens a rank")->check(at_least(1));
  command.add_option("-H,--width", options.H, "row width")->check(at_least(1));
  command.add_option("-E,--experts", options.E, "experts")->check(at_least(1));
  command.add_option("-K,--top-k", options.K, "experts per token")->check(at_least(1));
  command.add_option("-F,--inner", options.F, "expert inner width")->check(at_least(1));
  command.add_option("-P,--ranks", options.P, "ranks (threads of this process)")->check(at_least(1));
  command.add_option("--threads", options.threads, "CPU threads of a rank (default: usable cores / ranks)")->check(at_least(1));
  command.add_option("--load", options.load, "load: " + load_names() + ", or recorded:RUN/routes/STEP/LAYER")->capture_default_str();
  command.add_option("--loads", options.loads_file, "TOML file of loads (default: bench/shapes/loads.toml)");
  command.add_option("--seed", options.seed, "of data and load")->check(at_least(0))->capture_default_str();
  command.add_option("--seconds", options.seconds, "least time of a measurement")->check(CLI::PositiveNumber)->capture_default_str();
  command.add_option("--iterations", options.iterations, "least number of timed calls")->check(at_least(1))->capture_default_str();
  command.add_option("--json", options.json, "write the records to this file (- = stdout)");
  command.add_flag("--no-check", options.no_check, "time without verifying first (records say so)");
}

}  // namespace waybill::cli
