// SPDX-License-Identifier: Apache-2.0
#include "bench/cuda/moe/options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <sstream>

#include "bench/cuda/moe/problem.h"
#include "waybill/error.h"
#include "waybill/route_io.h"
#include "waybill/workload.h"

namespace waybill::cuda::moe_bench {
namespace {

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

// An integer from `least`; a fraction or a number with something behind it is refused, not cut.
CLI::Validator integer_from(int least) {
  return CLI::Validator(
      [least](std::string& text) {
        int value = 0;
        const char* const end = text.data() + text.size();
        const auto [stop, error] = std::from_chars(text.data(), end, value);
        const bool good = error == std::errc() && stop == end && value >= least;
        return good ? std::string() : fmt::format("'{}' must be an integer of at least {}", text, least);
      },
      fmt::format(">={}", least));
}

CLI::Validator number_above_zero() {
  return CLI::Validator(
      [](std::string& text) {
        double value = 0;
        const bool good = CLI::detail::lexical_cast(text, value) && std::isfinite(value) && value > 0;
        return good ? std::string() : fmt::format("'{}' must be a number above 0", text);
      },
      ">0");
}

// Every part of a list.
CLI::Validator each(const CLI::Validator& part) {
  return CLI::Validator(
      [part](std::string& list) {
        std::string why = split(list).empty() ? "names nothing" : "";
        for (const std::string& text : split(list)) why = why.empty() ? part(text) : why;
        return why;
      },
      part.get_description() + ",...");
}

// A wrong name ends here, not after minutes.
CLI::Validator known_load() {
  return CLI::Validator(
      [](std::string& load) {
        try {
          if (is_recorded(load)) {
            (void)load_routes(recorded_folder(load));
          } else if (load != "natural") {
            parse_workload(load);
          }
        } catch (const Error& error) {
          return std::string(error.what());
        }
        return std::string();
      },
      "LOAD");
}

}  // namespace

std::vector<std::string> Options::all_stacks() {
  return {"sparse", "beside", "exact", "exact-resend", "exact-blocks", "dense-map", "padded", "capacity", "loop"};
}

bool Options::has_eager_row(const std::string& label) const {
  return std::any_of(eager.begin(), eager.end(), [&](const std::string& name) { return name == "all" || name == label; });
}

std::optional<Options> parse_options(int argc, char** argv) {
  Options o;
  CLI::App app("The matched module benchmark of the MoE layer on GPUs", argc > 0 ? argv[0] : "bench_cuda_moe");
  // A list is one argument, so that what follows it is not taken for a part.
  const auto list = [&](const char* name, const char* about, const CLI::Validator& part, const std::function<void(const std::vector<std::string>&)>& take) {
    app.add_option_function<std::string>(
           name, [take](const std::string& text) { take(split(text)); }, about)
        ->check(each(part));
  };
  const auto names = [&](const char* name, const char* about, const CLI::Validator& part, std::vector<std::string>& to) {
    list(name, about, part, [&to](const std::vector<std::string>& parts) { to = parts; });
  };
  const auto numbers = [&](const char* name, const char* about, std::vector<int>& to) {
    list(name, about, integer_from(2), [&to](const std::vector<std::string>& parts) {
      to.clear();
      for (const std::string& part : parts) to.push_back(std::stoi(part));
    });
  };
  const CLI::Validator any([](std::string&) { return std::string(); }, "NAME");
  app.add_option("out", o.path, "records, as JSON lines")->capture_default_str();
  names("--shape", "shapes of the shapes file", any, o.shapes);
  names("--stack", "designs", CLI::IsMember(Options::all_stacks()), o.stacks);
  names("--eager", "designs with an eager row beside their captured one, by their labels; or all, or none", any, o.eager);
  names("--load", "natural, W0 to W9, or recorded:RUN/routes/STEP/LAYER", known_load(), o.loads);
  list("--recipe", "also the sparse stack under these", CLI::IsMember({"fp8", "mxfp8", "nvfp4"}), [&](const std::vector<std::string>& parts) {
    o.recipes.clear();
    for (const std::string& name : parts) {
      for (const Recipe recipe : {Recipe::kFP8, Recipe::kMXFP8, Recipe::kNVFP4}) {
        if (name == to_string(recipe)) o.recipes.push_back(recipe);
      }
    }
  });
  numbers("--combine-sms", "SMs of beside", o.combine_sms), numbers("--column-blocks", "blocks of exact-blocks", o.column_blocks);
  app.add_flag("--ablation", o.ablation, "also the steps from dense-map to sparse");
  app.add_flag("--f32", o.f32, "also weight gradients that are added to in f32");
  app.add_flag("--wgrad-control", o.wgrad_control, "also the weight gradients by themselves, beside sums without an order");
  app.add_option("--iterations", o.iterations, "measured steps a row")->check(integer_from(1))->capture_default_str();
  app.add_option("--most-seconds", o.seconds, "most of them, for designs other than sparse and dense-map (20 steps at least)")->check(number_above_zero());
  app.add_option("--ranks", o.ranks, "ranks, on two GPUs or one")->check(integer_from(1))->capture_default_str();
  app.add_option("--factor", o.factor, "receive_factor of sparse and dense-map")->check(number_above_zero())->capture_default_str();
  app.add_option("--shapes", o.shapes_file, "the shapes file")->capture_default_str();
  app.add_option("--trace", o.trace, "write the phases of a step for Perfetto");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    WB_FAIL(ErrorCode::kInvalidArgument, "{}", error.what());
  }
  return o;
}

}  // namespace waybill::cuda::moe_bench
