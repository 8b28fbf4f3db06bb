// SPDX-License-Identifier: Apache-2.0
// The wall between C++ and C: no exception crosses it, and every struct is checked before it is read.
#pragma once

#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "waybill/error.h"
#include "waybill/waybill.h"

namespace waybill::capi {

// Remembers the text for wb_last_error() of this thread; cannot fail.
void set_last_error(const char* text) noexcept;
wb_status status_of_current_exception() noexcept;

// Runs body() and turns whatever it throws into a status.
template <class Body>
wb_status guarded(Body&& body) noexcept {
  try {
    body();
    return WB_OK;
  } catch (...) {
    return status_of_current_exception();
  }
}

template <class T>
T& required(T* pointer, const char* name) {
  WB_CHECK(pointer != nullptr, "{} is null", name);
  return *pointer;
}

// Size of the struct in the first header that had it. Specialise it in the change that makes a struct grow.
template <class T>
constexpr std::uint64_t first_size() {
  return sizeof(T);
}

// ABI 1 before recipes.
template <>
constexpr std::uint64_t first_size<wb_moe_config>() {
  return 240;
}
// Before device memory.
template <>
constexpr std::uint64_t first_size<wb_router_inputs>() {
  return 488;
}
template <>
constexpr std::uint64_t first_size<wb_router_outputs>() {
  return 112;
}
template <>
constexpr std::uint64_t first_size<wb_moe_forward_options>() {
  return 136;
}

template <class T>
void check_size(std::uint64_t given, const char* name) {
  WB_CHECK(given >= first_size<T>() && given <= sizeof(T),
           "{}.struct_size is {}, this library (ABI {}) knows {} to {}; set it with the init function, or to sizeof where there is none", name, given,
           WB_ABI_VERSION, first_size<T>(), sizeof(T));
}

// The caller's struct; fields that its older header lacks are taken from `defaults`.
template <class T>
T read_struct(const T* given, const char* name, T defaults = {}) {
  const T& source = required(given, name);
  check_size<T>(source.struct_size, name);
  std::memcpy(&defaults, &source, static_cast<std::size_t>(source.struct_size));
  return defaults;
}

// Writes as much of `value` as the caller's header knows.
template <class T>
void write_struct(T* target, T value, const char* name) {
  T& destination = required(target, name);
  check_size<T>(destination.struct_size, name);
  value.struct_size = destination.struct_size;
  std::memcpy(&destination, &value, static_cast<std::size_t>(value.struct_size));
}

// For *_init functions: the size comes as an argument because the memory is not initialised yet.
template <class T>
void init_struct(T* target, std::uint64_t struct_size, T value, const char* name) {
  required(target, name);
  check_size<T>(struct_size, name);
  value.struct_size = struct_size;
  std::memcpy(target, &value, static_cast<std::size_t>(struct_size));
}

// An enum of the C++ API from its C number.
template <class Enum>
Enum checked_enum(std::int32_t value, Enum last, const char* name) {
  WB_CHECK(value >= 0 && value <= static_cast<std::int32_t>(last), "{} is {}, allowed are 0 to {}", name, value, static_cast<std::int32_t>(last));
  return static_cast<Enum>(value);
}

}  // namespace waybill::capi
