// SPDX-License-Identifier: Apache-2.0
// Where the CUDA activations plug in without a CUDA header here: their library sets the pointer once, before the first call.
#pragma once

#include "waybill/activation.h"

namespace waybill::detail {

// A checked call on a device.
struct ActivationDeviceCall {
  const ActivationConfig& config;
  TensorView h, a;  // backward: a is da
  const float* weight;
  const std::int32_t* num_rows;
  Stream stream;
  TensorView dh;              // backward
  float* d_weight = nullptr;  // backward
};

struct ActivationDeviceBackend {
  void (*forward)(const ActivationDeviceCall& call);
  void (*backward)(const ActivationDeviceCall& call);
};
extern const ActivationDeviceBackend* g_activation_device_backend;

}  // namespace waybill::detail
