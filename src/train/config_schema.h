// SPDX-License-Identifier: Apache-2.0
// The table of config keys: name, type, what is allowed, meaning, and where the value lives. Reading, --set, writing and help all
// go through it, so a key is declared once.
#pragma once

#include <functional>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "waybill/train_config.h"

namespace waybill {

enum class KeyType { kBool, kInteger, kReal, kText, kChoice };

template <class Object>
struct ConfigKey {
  std::string name;  // dotted: "moe.E"
  KeyType type;
  std::string help;
  double min = 0, max = 0;           // kInteger, kReal
  std::vector<std::string> choices;  // kChoice, in the order of the enum
  std::function<void(Object&, const ConfigValue&)> set;
  std::function<ConfigValue(const Object&)> get;
};

using RunKey = ConfigKey<RunConfig>;
using LayerKey = ConfigKey<LayerConfig>;

// Keys of [moe], [router] and [exchange]: of one layer.
const std::vector<LayerKey>& layer_keys();
// All keys: the run's own and the layer keys, which here set the defaults of every layer.
const std::vector<RunKey>& run_keys();

// What a value of this key may be, for messages: "an integer from 1 to 4096".
std::string allowed(KeyType type, double min, double max, const std::vector<std::string>& choices);
// Throws with `origin`, key, value and what is allowed; returns the value converted to the key's type (integers to reals).
ConfigValue check_value(const std::string& origin, const std::string& name, KeyType type, double min, double max, const std::vector<std::string>& choices,
                        const ConfigValue& value);
std::string to_toml_value(const ConfigValue& value);
// The candidate with the smallest edit distance, or empty where nothing is near.
std::string nearest(const std::string& word, const std::vector<std::string>& candidates);

}  // namespace waybill
