// SPDX-License-Identifier: Apache-2.0
#include "waybill/version.h"

namespace waybill {

const char* version() { return WB_VERSION_STRING; }

}  // namespace waybill
