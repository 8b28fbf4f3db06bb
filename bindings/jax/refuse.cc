// SPDX-License-Identifier: Apache-2.0
// What GPU programs get from a library without CUDA, and from the ops that have no CUDA form: one clear error instead of a missing target.
#include "ffi_support.h"

namespace waybill::jax {
namespace {

ffi::Error refuse_device(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return ffi::Error(ffi::ErrorCode::kUnimplemented, "waybill: this op computes on the CPU only in this build, but the arrays are on a GPU");
}

ffi::Error refuse_cpu(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return ffi::Error(ffi::ErrorCode::kUnimplemented, "waybill: this program was traced for a GPU (platform 'cuda'), but the arrays are on the CPU");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_refuse_cpu, refuse_cpu, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_refuse_device, refuse_device, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

}  // namespace waybill::jax
