// SPDX-License-Identifier: Apache-2.0
// Any bytes as a route file. The first byte says whether they are the whole file, or a header and a body that get sizes and checksums
// that agree, so that what lies behind the checksums is reached. Either refused with the path, or a route that can be planned, shown,
// written and read again.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "fuzz_folder.h"
#include "fuzz_input.h"
#include "route/crc32.h"
#include "waybill/error.h"
#include "waybill/route_io.h"
#include "waybill/route_plan.h"
#include "waybill/route_stats.h"

namespace {

using namespace waybill;

// A file of format version 1 with small sizes from the input, right checksums, and the input's bytes as body.
std::string file_from(fuzz::Input& input) {
  const std::uint32_t version = 1, id_bytes = input.pick(2) == 0 ? 2 : 4;
  const std::int64_t T = input.pick(9), K = 1 + input.pick(5), E = 1 + input.pick(12);
  std::string body = input.rest();
  body.resize(static_cast<std::size_t>(T * K * (id_bytes + 4) + E * 4));
  std::string head = "WBROUTE\n";
  const auto put = [&head](auto value) { head.append(reinterpret_cast<const char*>(&value), sizeof value); };
  put(version);
  put(id_bytes);
  put(T);
  put(K);
  put(E);
  put(detail::crc32(body.data(), body.size()));
  put(detail::crc32(head.data(), head.size()));
  return head + body;
}

void use(const Route& route, const std::string& path) {
  const int P = route.E() % 3 == 0 ? 3 : route.E() % 2 == 0 ? 2 : 1;
  const ExpertPlacement placement = block_placement(route.E(), P);
  const RouteStats stats = route_stats(route.view(), placement);
  const RoutePlan plan = make_route_plan(route.view(), placement);
  validate(plan, placement);
  if (plan.num_slots() != stats.num_routes || describe(route.view(), 4).empty() || describe(stats).empty()) std::abort();
  save_route(path, route.view());
  const Route again = load_route(path);
  const auto slots = static_cast<std::size_t>(route.T() * route.K());
  if (slots > 0 && std::memcmp(again.view().weights, route.view().weights, slots * sizeof(float)) != 0) std::abort();
  for (std::size_t i = 0; i < slots; ++i) {
    const auto t = static_cast<std::int64_t>(i) / route.K(), k = static_cast<std::int64_t>(i) % route.K();
    if (again.view().id(t, k) != route.view().id(t, k)) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const fuzz::Folder folder;
  const std::string path = folder.path() + "/fuzz.route";
  fuzz::Input input(data, size);
  fuzz::write_file(path, input.pick(2) == 0 ? input.rest() : file_from(input));
  try {
    use(load_route(path), path);
  } catch (const Error& error) {
    if (std::string(error.what()).find("fuzz.route") == std::string::npos) std::abort();
  }
  return 0;
}
