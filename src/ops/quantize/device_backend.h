// SPDX-License-Identifier: Apache-2.0
// Where the CUDA quantisers plug in without a CUDA header here: their library sets the pointer once, before the first call; and checks.
#pragma once

#include <string>

#include "waybill/quantize_activated.h"

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

// A checked call on an activation's result (x.da null) or gradient; `values` tells the shape and type of what is quantised, its data is not read.
struct QuantizeActivatedCall {
  const QuantConfig* config;
  const QuantizedView* out;
  const QuantConfig* columns;        // or null
  const QuantizedView* columns_out;  // or null
  const ActivatedRows& x;
  TensorView values, offsets;
  Stream stream;
  StatusWord* status;
};

// portable: only kernels that take every format. refuse: why not; empty = accepts.
struct QuantizeDeviceBackend {
  std::string (*refuse)(const QuantizeCall& call, bool portable);
  void (*run)(const QuantizeCall& call, bool portable);
  void (*dequantize)(const QuantConfig& config, const QuantizedView& q, const TensorView& offsets, const TensorView& y, Stream stream, StatusWord* status);
  std::string (*refuse_activated)(const QuantizeActivatedCall& call);
  void (*run_activated)(const QuantizeActivatedCall& call);
};
extern const QuantizeDeviceBackend* g_quantize_device_backend;

// What quantize() and quantize_both() refuse. wide: the tensor that is quantised; its data is not read.
void check_quantize(const QuantConfig& config, const TensorView& wide, const TensorView& offsets, const QuantizedView& out);
void check_quantize_both(const QuantConfig& rows, const QuantConfig& columns);

}  // namespace waybill::detail
