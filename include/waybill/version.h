// SPDX-License-Identifier: Apache-2.0
// The version, in one place. C can include this header; CMakeLists.txt is checked against it when configuring.
#pragma once

#include "waybill/export.h"

#define WB_VERSION_MAJOR 0
#define WB_VERSION_MINOR 1
#define WB_VERSION_PATCH 0
#define WB_VERSION_STRING "0.1.0"

#ifdef __cplusplus
namespace waybill {

// Version of the library that is loaded; the macros give the version of the headers.
WB_API const char* version();

}  // namespace waybill
#endif
