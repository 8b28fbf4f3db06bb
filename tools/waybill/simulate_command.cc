// SPDX-License-Identifier: Apache-2.0
// waybill simulate exchange: copies, bytes and least time of one exchange for a list of group sizes.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "arguments.h"
#include "commands.h"
#include "table.h"
#include "waybill/simulate.h"

namespace waybill::cli {
namespace {

struct SimulateOptions {
  ExchangeShape shape;
  ClusterSpec cluster;
  std::vector<int> ranks = {2, 4, 8, 16, 32, 64};
  int domain_size = 8;
  std::string row = "bf16";
  bool json = false;
};

double row_bytes(const std::string& row, std::int64_t H) {
  const double width = static_cast<double>(H);
  if (row == "fp32") return 4 * width;
  if (row == "fp8") return width + 4 * (width / 128);  // one fp32 scale per 128 values
  return 2 * width;
}

struct Variant {
  const char* name;
  DedupKind kind;
};
constexpr Variant kVariants[] = {{"none", DedupKind::kNone}, {"rank", DedupKind::kRank}, {"hierarchical", DedupKind::kHierarchical}};

void run(const SimulateOptions& options) {
  ExchangeShape shape = options.shape;
  shape.row_bytes = row_bytes(options.row, shape.H);
  Table table({"P", "domains", "dedup", "rows/token", "link bytes", "network bytes", "least us", "bound"});
  nlohmann::json records = nlohmann::json::array();
  for (const int P : options.ranks) {
    ClusterSpec cluster = options.cluster;
    cluster.P = P;
    cluster.num_domains = std::max(1, P / options.domain_size);
    for (const Variant& variant : kVariants) {
      if (variant.kind == DedupKind::kHierarchical && cluster.num_domains == 1) continue;
      const ExchangeEstimate estimate = estimate_exchange(cluster, shape, variant.kind);
      const double copies = shape.T > 0 ? estimate.rows_sent / static_cast<double>(shape.T) : 0;
      table.add({fmt::format("{}", P), fmt::format("{}", cluster.num_domains), variant.name, fmt::format("{:.3f}", copies), format_bytes(estimate.link_bytes),
                 format_bytes(estimate.network_bytes), fmt::format("{:.1f}", estimate.time_us()), estimate.bound()});
      records.push_back({{"op", "exchange"},
                         {"case", fmt::format("T{} H{} E{} K{} P{} {}", shape.T, shape.H, shape.E, shape.K, P, options.row)},
                         {"variant", variant.name},
                         {"metric", "time"},
                         {"unit", "us"},
                         {"value", estimate.time_us()},
                         {"evidence", "model"},
                         {"checked", false},
                         {"domains", cluster.num_domains},
                         {"rows_per_token", copies},
                         {"link_bytes", estimate.link_bytes},
                         {"network_bytes", estimate.network_bytes},
                         {"bound", estimate.bound()}});
    }
  }
  if (options.json) {
    fmt::print("{}\n", nlohmann::json{{"records", records}}.dump(2));
    return;
  }
  fmt::print("model: uniform routing, one direction, T={} H={} E={} K={} rows {} ({:.0f} B), link {} GB/s, network {} GB/s, memory {} GB/s\n", shape.T, shape.H,
             shape.E, shape.K, options.row, shape.bytes_per_row(), options.cluster.link_gbps, options.cluster.network_gbps, options.cluster.memory_gbps);
  table.print(stdout);
}

}  // namespace

void register_simulate_command(CLI::App& app) {
  CLI::App* simulate = app.add_subcommand("simulate", "Predict what an exchange costs on a cluster (a model, not a measurement)");
  simulate->require_subcommand(1);
  CLI::App* exchange = simulate->add_subcommand("exchange", "Copies, bytes and least time of one dispatch or combine");
  auto options = std::make_shared<SimulateOptions>();
  exchange->add_option("-T,--tokens", options->shape.T, "tokens per rank")->check(at_least(0))->capture_default_str();
  exchange->add_option("-H,--width", options->shape.H, "values of a row")->check(at_least(1))->capture_default_str();
  exchange->add_option("-E,--experts", options->shape.E, "experts")->check(at_least(1))->capture_default_str();
  exchange->add_option("-K,--top-k", options->shape.K, "experts per token")->check(at_least(1))->capture_default_str();
  exchange->add_option("-P,--ranks", options->ranks, "group sizes, comma separated")->delimiter(',')->check(at_least(1))->capture_default_str();
  exchange->add_option("--domain-size", options->domain_size, "ranks that share fast links")->check(at_least(1))->capture_default_str();
  exchange->add_option("--row", options->row, "payload type")->check(CLI::IsMember({"bf16", "fp32", "fp8"}))->capture_default_str();
  exchange->add_option("--link-gbps", options->cluster.link_gbps, "GB/s inside a domain, per rank and direction")->capture_default_str();
  exchange->add_option("--network-gbps", options->cluster.network_gbps, "GB/s between domains, per rank and direction")->capture_default_str();
  exchange->add_option("--memory-gbps", options->cluster.memory_gbps, "GB/s of local memory, read plus written")->capture_default_str();
  exchange->add_flag("--json", options->json, "records as JSON");
  exchange->callback([options] { run(*options); });
}

}  // namespace waybill::cli
