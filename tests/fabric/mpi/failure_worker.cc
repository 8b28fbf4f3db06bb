// SPDX-License-Identifier: Apache-2.0
// One rank that exchanges rows until something breaks: failure_worker FOLDER TIMEOUT_MS SECONDS. It writes FOLDER/rank_R.log itself,
// because the launcher's own connection may be what breaks: "pid ..", "ready", then "end" or "error CODE after N ms: TEXT".
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#include "waybill/exchange.h"
#include "waybill/mpi_fabric.h"

namespace {

using Clock = std::chrono::steady_clock;

long elapsed_ms(Clock::time_point start) { return static_cast<long>(std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count()); }

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  waybill::MpiOptions options;
  options.fabric.timeout = std::chrono::milliseconds(std::atol(argv[2]));
  const auto world = waybill::make_mpi_fabric(options);
  std::ofstream log(std::string(argv[1]) + "/rank_" + std::to_string(world->rank()) + ".log");
  log << "pid " << getpid() << "\nnode " << world->topology().node_of[static_cast<std::size_t>(world->rank())] << std::endl;
  waybill::ExchangeConfig config;
  config.H = 2000;
  config.E = 2 * world->size();
  config.K = 2;
  config.hierarchy = waybill::Hierarchy::kAuto;
  const std::int64_t T = 64;
  std::vector<std::int32_t> ids;
  for (std::int32_t t = 0; t < T; ++t) {
    ids.push_back(t % static_cast<std::int32_t>(config.E));
    ids.push_back((t + 1) % static_cast<std::int32_t>(config.E));
  }
  auto last = Clock::now();
  try {
    waybill::Exchange exchange(config, waybill::block_placement(config.E, world->size()), *world);
    const waybill::Route route = waybill::Route::from_ids(T, 2, config.E, ids);
    const waybill::Tensor x = waybill::Tensor::zeros(waybill::DType::kF32, {T, config.H}), out = waybill::Tensor::zeros(waybill::DType::kF32, {T, config.H});
    const auto end = Clock::now() + std::chrono::seconds(std::atol(argv[3]));
    for (std::int64_t step = 0, more = 1; more > 0; ++step) {
      const waybill::DispatchHandle handle = exchange.plan(route);
      waybill::Tensor rows;
      exchange.dispatch(handle, x, rows);
      exchange.combine(handle, rows, out);
      more = Clock::now() < end ? 1 : 0;
      world->broadcast(&more, sizeof more, 0, "go on");
      last = Clock::now();
      if (step == 3) log << "ready" << std::endl;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  } catch (const waybill::Error& error) {
    const char* kind = error.code() == waybill::ErrorCode::kTimeout ? "timeout" : error.code() == waybill::ErrorCode::kPeerFailed ? "peer_failed" : "other";
    log << "error " << kind << " after " << elapsed_ms(last) << " ms: " << error.what() << std::endl;
    std::fprintf(stderr, "rank %d: %s\n", world->rank(), error.what());
    return 3;
  }
  log << "end" << std::endl;
  return 0;
}
