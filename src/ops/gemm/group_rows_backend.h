// SPDX-License-Identifier: Apache-2.0
// Where the CUDA kernel of group_rows() plugs in: its library sets the pointer once, before the first call.
#pragma once

#include "waybill/group_rows.h"

namespace waybill::detail {

using GroupRowsFn = void (*)(const GroupRowsArgs& args, std::int64_t num_groups, Stream stream);
extern GroupRowsFn g_group_rows_on_device;

}  // namespace waybill::detail
