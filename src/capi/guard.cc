// SPDX-License-Identifier: Apache-2.0
#include "guard.h"

#include <algorithm>
#include <cstdio>

namespace waybill::capi {
namespace {

// A fixed buffer: reporting that memory ran out must not need memory.
constexpr std::size_t kMaxText = 2048;
thread_local char last_error_text[kMaxText] = "";

}  // namespace

void set_last_error(const char* text) noexcept { std::snprintf(last_error_text, kMaxText, "%s", text); }

wb_status status_of_current_exception() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    set_last_error(error.what());
    return static_cast<wb_status>(error.code());
  } catch (const std::bad_alloc&) {
    set_last_error("out of memory");
    return WB_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    set_last_error(error.what());
    return WB_INTERNAL;
  } catch (...) {
    set_last_error("an exception of unknown type");
    return WB_INTERNAL;
  }
}

}  // namespace waybill::capi

const char* wb_last_error(void) noexcept { return waybill::capi::last_error_text; }
