/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI of low-precision formats: matrices, and activations as they are computed, in 8 and 4 bits with a scale a block. Included by waybill.h; the rules
 * are there. Memory of one device throughout: the CPU's, or a CUDA device's as in wb_grouped_gemm.
 */
#ifndef WAYBILL_WAYBILL_QUANTIZE_H_
#define WAYBILL_WAYBILL_QUANTIZE_H_

#include "waybill/waybill.h"

#ifdef __cplusplus
extern "C" {
#endif

enum wb_element_format { WB_E4M3 = 0, WB_E5M2 = 1, WB_E2M1 = 2 };
enum wb_scale_rule { WB_SCALE_ROUND_UP = 0, WB_SCALE_FLOOR = 1 };
enum wb_scale_format { WB_SCALE_E8M0 = 0, WB_SCALE_POWER_OF_TWO = 1, WB_SCALE_F32 = 2, WB_SCALE_E4M3 = 3 };
typedef struct wb_quant_config {
  uint64_t struct_size;
  int32_t element, scale, rule; /* rule: wb_scale_rule */
  int32_t stochastic;           /* 1: elements are rounded by counter from `seed` */
  int64_t block_rows, block_columns;
  uint64_t seed;
} wb_quant_config;
/* MXFP8 by rows: E4M3, E8M0 scales rounded up, blocks of 1 x 32. */
WB_API wb_status wb_quant_config_init(wb_quant_config* config, uint64_t struct_size) WB_NOEXCEPT;

typedef struct wb_quantized {
  uint64_t struct_size;
  wb_tensor codes;        /* [S, C] f8e4m3, f8e5m2 or u8; E2M1: [S, C / 2] u8, the even column in the low half */
  wb_tensor scales;       /* [scale rows, ceil(C / block_columns)]: u8 (E8M0), f32 (power of two, F32), f8e4m3 or u8 (E4M3) */
  wb_tensor group_scales; /* [L] f32, E4M3 scales only */
} wb_quantized;
/* x [S, C] fp32 or bf16. offsets [L+1] int32: blocks do not cross groups; null = one group. A block with a NaN gets NaN codes and scale. */
WB_API wb_status wb_quantize(const wb_quant_config* config, const wb_tensor* x, const wb_tensor* offsets, const wb_quantized* out,
                             const wb_stream* stream) WB_NOEXCEPT;
WB_API wb_status wb_dequantize(const wb_quant_config* config, const wb_quantized* quantized, const wb_tensor* offsets, const wb_tensor* y,
                               const wb_stream* stream) WB_NOEXCEPT;

/* What wb_quantize_activated quantises: weight * act(h) [S, F] or, where da is given, the gradient of h; to the bit the activation in a tensor of h's type,
 * then wb_quantize, which waybill/quantize_activated.h says more of. */
typedef struct wb_activated_rows {
  uint64_t struct_size;
  int32_t activation;                       /* wb_activation */
  float activation_limit, activation_alpha; /* clamped SwiGLU */
  int32_t reserved;
  wb_tensor h;                  /* [S, 2F or F] f32 or bf16 */
  wb_tensor weight;             /* [S] f32 or not given */
  wb_tensor da, d_weight;       /* [S, F] of h's type; written [S] f32; or not given */
  wb_tensor partial_sums, wide; /* GPU: f32 [S, ceil(F / 64)] beside d_weight; room for the values where the fused kernels refuse, or not given */
} wb_activated_rows;
/* SwiGLU, limit 7 and alpha 1.702 for the clamped kind, no tensor given. */
WB_API wb_status wb_activated_rows_init(wb_activated_rows* rows, uint64_t struct_size) WB_NOEXCEPT;
WB_API wb_status wb_quantize_activated(const wb_quant_config* config, const wb_activated_rows* x, const wb_tensor* offsets, const wb_quantized* out,
                                       const wb_stream* stream) WB_NOEXCEPT;

#ifdef __cplusplus
}
#endif

#endif /* WAYBILL_WAYBILL_QUANTIZE_H_ */
