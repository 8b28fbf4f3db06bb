// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string_view>

#include "config_schema.h"
#include "waybill/error.h"

namespace waybill {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto u = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (u < 0x20 || u == 0x7f) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(u));
    } else {
      out += c;
    }
  }
  return out + "\"";
}

void write_layer(std::string& out, const LayerOverride& layer) {
  out += fmt::format("\n[[layers]]\nindex = [{}]\n", fmt::join(layer.index, ", "));
  for (const auto& [name, value] : layer.values) out += fmt::format("{} = {}\n", name, to_toml_value(value));
}

// Keys of the sections for which `wanted` holds, in table order.
template <class Wanted>
std::string write_sections(const RunConfig& config, Wanted wanted) {
  std::string out, open;
  for (const RunKey& key : run_keys()) {
    const auto dot = key.name.find('.');
    const std::string section = dot == std::string::npos ? "" : key.name.substr(0, dot);
    if (!wanted(key.name, section)) continue;
    if (section != open) {
      out += fmt::format("\n[{}]\n", section);
      open = section;
    }
    out += fmt::format("{} = {}\n", dot == std::string::npos ? key.name : key.name.substr(dot + 1), to_toml_value(key.get(config)));
  }
  return out;
}

}  // namespace

std::string to_toml_value(const ConfigValue& value) {
  if (const auto* v = std::get_if<bool>(&value)) return *v ? "true" : "false";
  if (const auto* v = std::get_if<std::int64_t>(&value)) return fmt::format("{}", *v);
  if (const auto* v = std::get_if<std::string>(&value)) return quoted(*v);
  std::string text = fmt::format("{}", std::get<double>(value));
  if (text.find_first_of(".eni") == std::string::npos) text += ".0";
  return text;
}

std::string to_toml(const RunConfig& config) {
  std::string out = write_sections(config, [](const std::string&, const std::string&) { return true; });
  for (const LayerOverride& layer : config.layers) write_layer(out, layer);
  return out;
}

std::string model_toml(const RunConfig& config) {
  // What changes speed, memory or balance but not the meaning of the saved tensors may differ.
  static constexpr std::string_view kFree[] = {"moe.recompute", "moe.force_dense_map",     "moe.recipe",    "moe.scale_rule", "moe.power_of_two_scales",
                                               "moe.hadamard",  "moe.stochastic_rounding", "model.seq_len", "model.init_std"};
  std::string out = write_sections(config, [](const std::string& name, const std::string& section) {
    return (section == "model" || section == "moe" || section == "router") && std::find(std::begin(kFree), std::end(kFree), name) == std::end(kFree);
  });
  for (const LayerOverride& layer : config.layers) {
    LayerOverride shapes{layer.index, {}};
    for (const auto& item : layer.values) {
      if (item.first != "P" && !item.first.starts_with("exchange.") && std::find(std::begin(kFree), std::end(kFree), item.first) == std::end(kFree)) {
        shapes.values.push_back(item);
      }
    }
    if (!shapes.values.empty()) write_layer(out, shapes);
  }
  return out;
}

}  // namespace waybill
