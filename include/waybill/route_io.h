// SPDX-License-Identifier: Apache-2.0
// Routes as files. Little-endian, whatever the machine:
//   0  char[8]  "WBROUTE\n"        8  u32 version = 1      12  u32 bytes per id (2 or 4)
//   16 i64 T   24 i64 K   32 i64 E                         40  u32 CRC-32 of the body   44  u32 CRC-32 of bytes 0..43
//   48 body: ids [T, K], weights [T, K] f32, counts [E] i32
// CRC-32: polynomial 0xEDB88320 (the one of zip and PNG).
#pragma once

#include <string>
#include <vector>

#include "waybill/route.h"

namespace waybill {

// Atomic: writes a temporary file beside `path` and renames it. kIo with path and reason on failure; nothing half-written stays.
// Host routes; counts are computed where the route has none.
WB_API void save_route(const std::string& path, const RouteView& route);

// kIo naming the file and what is wrong: missing, truncated, too long, not a route file, another version, corrupt. Nothing is
// allocated before the sizes agree with the file's. The content is checked like a caller's (validate with `check`).
WB_API Route load_route(const std::string& path, const RouteCheck& check = {});

// Routes of the ranks 0, 1, ... of a recorded step: FOLDER/rank_000.route and on (RUN/routes/step_*/layer_*). kIo naming what is missing or differs.
WB_API std::vector<Route> load_routes(const std::string& folder);
// The same tokens in the same order, in P nearly equal parts.
WB_API std::vector<Route> split_routes(std::vector<Route> routes, int P);

// Text for people: one header line, then "token 12: 3*0.500 17*0.250 -" for the first `max_rows` tokens.
WB_API std::string describe(const RouteView& route, std::int64_t max_rows);

}  // namespace waybill
