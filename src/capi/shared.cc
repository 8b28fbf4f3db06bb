// SPDX-License-Identifier: Apache-2.0
// A shared library needs a source of its own; everything it carries comes from the folders' archives.
#include "waybill/waybill.h"

static_assert(sizeof(wb_tensor) == 88, "wb_tensor has a frozen layout");
