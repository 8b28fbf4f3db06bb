// SPDX-License-Identifier: Apache-2.0
// Macros shared by every header: symbol visibility and host/device functions.
#pragma once

#if defined(__GNUC__)
#define WB_API __attribute__((visibility("default")))
#else
#define WB_API
#endif

// Functions that CPU code and CUDA kernels share.
#if defined(__CUDACC__)
#define WB_HD __host__ __device__
#else
#define WB_HD
#endif
