// SPDX-License-Identifier: Apache-2.0
#include <toml++/toml.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>

#include "config_schema.h"
#include "waybill/error.h"

namespace waybill {
namespace {

std::string at(const std::string& origin, const toml::node& node) { return fmt::format("{}:{}", origin, node.source().begin.line); }

std::optional<ConfigValue> scalar(const toml::node& node) {
  if (const auto* v = node.as_boolean()) return ConfigValue(v->get());
  if (const auto* v = node.as_integer()) return ConfigValue(v->get());
  if (const auto* v = node.as_floating_point()) return ConfigValue(v->get());
  if (const auto* v = node.as_string()) return ConfigValue(v->get());
  return std::nullopt;
}

template <class Key>
std::vector<std::string> key_names(const std::vector<Key>& keys) {
  std::vector<std::string> names;
  names.reserve(keys.size());
  for (const auto& key : keys) names.push_back(key.name);
  return names;
}

// "moe.E" for "E", "train.steps" for "stesp": a key given without its section. The first of several sections that have it.
std::string with_section(const std::string& name, const std::vector<std::string>& candidates) {
  if (name.find('.') != std::string::npos) return "";
  std::vector<std::string> last_parts;
  last_parts.reserve(candidates.size());
  for (const std::string& candidate : candidates) last_parts.push_back(candidate.substr(candidate.rfind('.') + 1));
  const auto exact = std::find(last_parts.begin(), last_parts.end(), name);
  const auto found = exact != last_parts.end() ? exact : std::find(last_parts.begin(), last_parts.end(), nearest(name, last_parts));
  return found != last_parts.end() ? candidates[static_cast<std::size_t>(found - last_parts.begin())] : std::string();
}

[[noreturn]] void unknown_key(const std::string& where, const std::string& name, const std::vector<std::string>& candidates) {
  std::string near = with_section(name, candidates);
  if (near.empty()) near = nearest(name, candidates);
  if (near.empty()) WB_FAIL(ErrorCode::kInvalidArgument, "{}: unknown key {}", where, name);
  WB_FAIL(ErrorCode::kInvalidArgument, "{}: unknown key {}; did you mean {}?", where, name, near);
}

void set_run_key(RunConfig& config, const std::string& where, const std::string& name, const ConfigValue& value) {
  for (const RunKey& key : run_keys()) {
    if (key.name == name) {
      key.set(config, check_value(where, name, key.type, key.min, key.max, key.choices, value));
      return;
    }
  }
  unknown_key(where, name, key_names(run_keys()));
}

// Checks a value of [[layers]]; it is applied by resolve().
ConfigValue check_layer_value(const std::string& where, const std::string& name, const ConfigValue& value) {
  if (name == "kind") return check_value(where, "layers.kind", KeyType::kChoice, 0, 0, {"dense", "moe"}, value);
  if (name == "dense_F") return check_value(where, "layers.dense_F", KeyType::kInteger, 1, 1 << 20, {}, value);
  if (name == "P") return check_value(where, "layers.P", KeyType::kInteger, 1, 4096, {}, value);
  for (const LayerKey& key : layer_keys()) {
    if (key.name == name) return check_value(where, "layers." + name, key.type, key.min, key.max, key.choices, value);
  }
  std::vector<std::string> names = key_names(layer_keys());
  names.insert(names.end(), {"index", "kind", "dense_F", "P"});
  unknown_key(where, name, names);
}

std::vector<std::int64_t> read_index(const std::string& origin, const toml::node& node) {
  std::vector<std::int64_t> index;
  if (const auto* one = node.as_integer()) index.push_back(one->get());
  if (const auto* array = node.as_array()) {
    for (const toml::node& item : *array) {
      WB_CHECK(item.is_integer(), "{}: layers.index must hold integers", at(origin, item));
      index.push_back(item.as_integer()->get());
    }
  }
  WB_CHECK(!index.empty(), "{}: layers.index must be an integer or a list of integers", at(origin, node));
  return index;
}

LayerOverride read_layer(const std::string& origin, const toml::table& table) {
  LayerOverride layer;
  for (const auto& [key, node] : table) {
    const std::string name(key.str());
    if (name == "index") {
      layer.index = read_index(origin, node);
    } else if (const auto* section = node.as_table()) {
      for (const auto& [inner, value] : *section) {
        const std::string dotted = name + "." + std::string(inner.str());
        const auto v = scalar(value);
        WB_CHECK(v.has_value(), "{}: layers.{} must be a single value", at(origin, value), dotted);
        layer.values.emplace_back(dotted, check_layer_value(at(origin, value), dotted, *v));
      }
    } else {
      const auto v = scalar(node);
      WB_CHECK(v.has_value(), "{}: layers.{} must be a single value", at(origin, node), name);
      layer.values.emplace_back(name, check_layer_value(at(origin, node), name, *v));
    }
  }
  WB_CHECK(!layer.index.empty(), "{}: [[layers]] needs index = the layers it changes", at(origin, table));
  return layer;
}

void read_layers(RunConfig& config, const std::string& origin, const toml::node& node) {
  const auto* array = node.as_array();
  WB_CHECK(array != nullptr && array->is_homogeneous(toml::node_type::table), "{}: layers must be given as [[layers]] tables", at(origin, node));
  for (const toml::node& item : *array) config.layers.push_back(read_layer(origin, *item.as_table()));
}

void read_section(RunConfig& config, const std::string& origin, const std::string& section, const toml::node& node) {
  const auto* table = node.as_table();
  if (table == nullptr) {
    const auto v = scalar(node);
    if (v.has_value()) return set_run_key(config, at(origin, node), section, *v);
    unknown_key(at(origin, node), section, key_names(run_keys()));
  }
  std::set<std::string> sections;
  for (const RunKey& key : run_keys()) {
    if (const auto dot = key.name.find('.'); dot != std::string::npos) sections.insert(key.name.substr(0, dot));
  }
  if (sections.count(section) == 0) {
    const std::string near = nearest(section, {sections.begin(), sections.end()});
    WB_FAIL(ErrorCode::kInvalidArgument, "{}: unknown section [{}]{}", at(origin, node), section,
            near.empty() ? "" : fmt::format("; did you mean [{}]?", near));
  }
  for (const auto& [key, value] : *table) {
    const std::string name = section + "." + std::string(key.str());
    const auto v = scalar(value);
    if (!v.has_value()) {
      std::vector<std::string> names = key_names(run_keys());
      if (std::find(names.begin(), names.end(), name) == names.end()) unknown_key(at(origin, value), name, names);
      WB_FAIL(ErrorCode::kInvalidArgument, "{}: {} must be a single value", at(origin, value), name);
    }
    set_run_key(config, at(origin, value), name, *v);
  }
}

// The value of "--set key=value": TOML syntax, or else the text itself (so that strings need no quotes).
ConfigValue parse_override_value(const std::string& text) {
  try {
    const toml::table table = toml::parse("v = " + text);
    if (const auto* node = table.get("v"); node != nullptr && table.size() == 1) {
      if (const auto v = scalar(*node)) return *v;
    }
  } catch (const toml::parse_error&) {
  }
  return text;
}

void apply_override(RunConfig& config, const std::string& text) {
  const auto equals = text.find('=');
  WB_CHECK(equals != std::string::npos && equals > 0, "--set {}: must be key=value, for example --set train.steps=100", text);
  const std::string where = "--set " + text, name = text.substr(0, equals);
  ConfigValue value = parse_override_value(text.substr(equals + 1));
  for (const RunKey& key : run_keys()) {
    // A number or "true" given for a string key is the text.
    if (key.name == name && key.type == KeyType::kText && !std::holds_alternative<std::string>(value)) value = text.substr(equals + 1);
  }
  set_run_key(config, where, name, value);
}

}  // namespace

RunConfig parse_run_config(const std::string& text, const std::string& origin, std::span<const std::string> overrides) {
  RunConfig config;
  try {
    const toml::table root = toml::parse(text, origin);
    for (const auto& [key, node] : root) {
      if (key.str() == "layers") {
        read_layers(config, origin, node);
      } else {
        read_section(config, origin, std::string(key.str()), node);
      }
    }
  } catch (const toml::parse_error& error) {
    WB_FAIL(ErrorCode::kInvalidArgument, "{}:{}:{}: {}", origin, error.source().begin.line, error.source().begin.column, error.description());
  }
  for (const std::string& item : overrides) apply_override(config, item);
  try {
    resolve(config);
  } catch (const Error& error) {
    WB_FAIL(error.code(), "{}: {}", origin, error.what());
  }
  return config;
}

RunConfig load_run_config(const std::string& path, std::span<const std::string> overrides) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (std::filesystem::is_directory(status)) {
    WB_FAIL(ErrorCode::kIo, "config {} is a folder; give a TOML file", path);
  }
  if (status.type() == std::filesystem::file_type::not_found) WB_FAIL(ErrorCode::kIo, "config file {} does not exist", path);
  if (!std::filesystem::is_regular_file(status))
    WB_FAIL(ErrorCode::kIo, "config {} is not a file that can be read: {}", path, error ? error.message() : "special file");
  std::ifstream file(path);
  if (!file) WB_FAIL(ErrorCode::kIo, "cannot read config file {}: {}", path, std::strerror(errno));
  std::stringstream text;
  text << file.rdbuf();
  if (!file) WB_FAIL(ErrorCode::kIo, "cannot read config file {}", path);
  return parse_run_config(text.str(), path, overrides);
}

}  // namespace waybill
