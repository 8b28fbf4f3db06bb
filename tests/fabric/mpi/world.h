// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "waybill/mpi_fabric.h"

namespace waybill::testing {

extern Fabric* g_world;  // of this process

}  // namespace waybill::testing
