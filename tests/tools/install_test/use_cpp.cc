// SPDX-License-Identifier: Apache-2.0
#include <waybill/error.h>
#include <waybill/route.h>

#include <cstdio>
#include <vector>

// The exception type must be one type on both sides of the shared library.
int main() {
  const std::vector<std::int32_t> ids = {0, 3, 1, 1};
  try {
    waybill::Route::from_ids(2, 2, 4, ids);
  } catch (const waybill::Error& error) {
    std::puts(error.what());
    return error.code() == waybill::ErrorCode::kInvalidArgument ? 0 : 1;
  }
  return 1;
}
