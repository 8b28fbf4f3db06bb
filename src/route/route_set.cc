// SPDX-License-Identifier: Apache-2.0
// Routes of several ranks.
#include <algorithm>
#include <filesystem>
#include <span>

#include "waybill/error.h"
#include "waybill/route_io.h"

namespace waybill {

std::vector<Route> load_routes(const std::string& name) {
  const std::filesystem::path folder = name;
  std::vector<Route> routes;
  for (auto file = folder / "rank_000.route"; std::filesystem::exists(file); file = folder / fmt::format("rank_{:03}.route", routes.size())) {
    routes.push_back(load_route(file.string()));
    if (routes.back().K() != routes.front().K() || routes.back().E() != routes.front().E()) {
      WB_FAIL(ErrorCode::kIo, "{}: K = {}, E = {}, but rank 0 of this folder has K = {}, E = {}", file.string(), routes.back().K(), routes.back().E(),
              routes.front().K(), routes.front().E());
    }
  }
  if (routes.empty()) WB_FAIL(ErrorCode::kIo, "{}: no rank_000.route; give RUN/routes/step_*/layer_* of a run with --record-routes", folder.string());
  const auto is_of_rank = [](const auto& entry) { return entry.path().filename().string().starts_with("rank_") && entry.path().extension() == ".route"; };
  const auto files = std::count_if(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator(), is_of_rank);
  if (files != static_cast<std::ptrdiff_t>(routes.size())) {  // some rank's tokens would be left out
    WB_FAIL(ErrorCode::kIo, "{}: rank_{:03}.route is missing, but routes of {} ranks are there", folder.string(), routes.size(), files);
  }
  return routes;
}

std::vector<Route> split_routes(std::vector<Route> routes, int P) {
  if (static_cast<int>(routes.size()) == P) return routes;
  const std::int64_t K = routes.front().K(), E = routes.front().E();
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  for (const Route& route : routes) {
    for (std::int64_t i = 0; i < route.T() * K; ++i) ids.push_back(route.view().id(i / K, i % K));
    weights.insert(weights.end(), route.view().weights, route.view().weights + route.T() * K);
  }
  const std::int64_t T = static_cast<std::int64_t>(ids.size()) / K;
  std::vector<Route> split;
  for (std::int64_t p = 0; p < P; ++p) {
    const auto begin = static_cast<std::size_t>(T * p / P * K), end = static_cast<std::size_t>(T * (p + 1) / P * K);
    split.push_back(Route::from_ids(static_cast<std::int64_t>(end - begin) / K, K, E, std::span(ids).subspan(begin, end - begin),
                                    std::span<const float>(weights).subspan(begin, end - begin)));
  }
  return split;
}

}  // namespace waybill
