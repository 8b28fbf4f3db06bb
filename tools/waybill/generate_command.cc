// SPDX-License-Identifier: Apache-2.0
#include "commands.h"

namespace waybill::cli {

void register_generate_command(CLI::App&) {}

}  // namespace waybill::cli
