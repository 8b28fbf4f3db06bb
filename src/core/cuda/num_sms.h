// SPDX-License-Identifier: Apache-2.0
// Streaming multiprocessors of a GPU or of its MIG slice, asked for once a device.
#pragma once

namespace waybill::cuda {

int num_sms(int device);
int num_sms();                  // of the current device
int num_sms_or(int otherwise);  // of device 0; `otherwise` where no GPU can be used

}  // namespace waybill::cuda
