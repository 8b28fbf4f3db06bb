// SPDX-License-Identifier: Apache-2.0
// Builds ConfigKey entries from a reference lambda: [](auto& c) -> auto& { return c.train.steps; }.
#pragma once

#include <cstdlib>
#include <utility>

#include "config_schema.h"

namespace waybill {

template <class Object, class Ref>
ConfigKey<Object> bool_key(std::string name, std::string help, Ref ref) {
  return {std::move(name),
          KeyType::kBool,
          std::move(help),
          0,
          0,
          {},
          [ref](Object& o, const ConfigValue& v) { ref(o) = std::get<bool>(v); },
          [ref](const Object& o) { return ConfigValue(static_cast<bool>(ref(o))); }};
}

template <class Object, class Ref>
ConfigKey<Object> integer_key(std::string name, double min, double max, std::string help, Ref ref) {
  return {std::move(name),
          KeyType::kInteger,
          std::move(help),
          min,
          max,
          {},
          [ref](Object& o, const ConfigValue& v) { ref(o) = static_cast<std::remove_reference_t<decltype(ref(o))>>(std::get<std::int64_t>(v)); },
          [ref](const Object& o) { return ConfigValue(static_cast<std::int64_t>(ref(o))); }};
}

// A float is given back as the shortest decimal that reads as the same float, so that files stay readable.
template <class T>
double shortest(T value) {
  return std::strtod(fmt::format("{}", value).c_str(), nullptr);
}

template <class Object, class Ref>
ConfigKey<Object> real_key(std::string name, double min, double max, std::string help, Ref ref) {
  return {std::move(name),
          KeyType::kReal,
          std::move(help),
          min,
          max,
          {},
          [ref](Object& o, const ConfigValue& v) { ref(o) = static_cast<std::remove_reference_t<decltype(ref(o))>>(std::get<double>(v)); },
          [ref](const Object& o) { return ConfigValue(shortest(ref(o))); }};
}

template <class Object, class Ref>
ConfigKey<Object> text_key(std::string name, std::string help, Ref ref) {
  return {std::move(name),
          KeyType::kText,
          std::move(help),
          0,
          0,
          {},
          [ref](Object& o, const ConfigValue& v) { ref(o) = std::get<std::string>(v); },
          [ref](const Object& o) { return ConfigValue(ref(o)); }};
}

// The value is one of `choices`; the enum's values are their positions.
template <class Object, class Ref>
ConfigKey<Object> choice_key(std::string name, std::vector<std::string> choices, std::string help, Ref ref) {
  auto set = [ref, choices](Object& o, const ConfigValue& v) {
    for (std::size_t i = 0; i < choices.size(); ++i) {
      if (choices[i] == std::get<std::string>(v)) ref(o) = static_cast<std::remove_reference_t<decltype(ref(o))>>(i);
    }
  };
  auto get = [ref, choices](const Object& o) { return ConfigValue(choices.at(static_cast<std::size_t>(ref(o)))); };
  return {std::move(name), KeyType::kChoice, std::move(help), 0, 0, std::move(choices), set, get};
}

}  // namespace waybill
