// SPDX-License-Identifier: Apache-2.0
// Where the CUDA quantisers plug in without a CUDA header here: their library sets the pointer once, before the first call.
#pragma once

#include <string>

#include "waybill/quantize.h"

namespace waybill::detail {

// A checked call on a device: one direction, or a second one from the same read.
struct QuantizeCall {
  const QuantConfig* config;
  const QuantizedView* out;
  const QuantConfig* columns;        // or null
  const QuantizedView* columns_out;  // or null
  const TensorView &x, &offsets;
  Stream stream;
  StatusWord* status;
  TensorView rows = {};  // [S] int32 or null: x.shape[0] is S, row s lies at rows[s] (-1: zeros)
};

// portable: only kernels that take every format. refuse: why not; empty = accepts.
struct QuantizeDeviceBackend {
  std::string (*refuse)(const QuantizeCall& call, bool portable);
  void (*run)(const QuantizeCall& call, bool portable);
  void (*dequantize)(const QuantConfig& config, const QuantizedView& q, const TensorView& offsets, const TensorView& y, Stream stream, StatusWord* status);
};
extern const QuantizeDeviceBackend* g_quantize_device_backend;

}  // namespace waybill::detail
