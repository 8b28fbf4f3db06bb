// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>

#include "waybill/error.h"

namespace waybill::test {

// The message of the Error that `body` throws; "no error" where it throws none.
template <class Body>
std::string error_text(Body&& body) {
  try {
    std::forward<Body>(body)();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace waybill::test
