// SPDX-License-Identifier: Apache-2.0
// No fault of the caller gets past a status code and a text with the values.
#include <gmock/gmock.h>

#include <thread>

#include "capi_testing.h"
#include "waybill/build_info.h"
#include "waybill/error.h"

namespace waybill::capi_testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct RouterCall {
  std::vector<float> logits = {1, 2, 3, 4};
  RouteMemory memory{1, 2, 4};
  wb_router_config config{};
  wb_router_inputs inputs = sized<wb_router_inputs>();
  wb_router_outputs outputs = sized<wb_router_outputs>();

  RouterCall() {
    EXPECT_WB_OK(wb_router_config_init(&config, sizeof config));
    config.E = 4;
    config.K = 2;
    inputs.logits = tensor(logits.data(), WB_F32, {1, 4});
    outputs.route = memory.route;
  }
  wb_status run() { return wb_router_forward(&config, &inputs, &outputs, nullptr); }
};

TEST(CApiErrors, NullPointersAreNamed) {
  RouterCall call;
  EXPECT_EQ(wb_router_forward(nullptr, &call.inputs, &call.outputs, nullptr), WB_INVALID_ARGUMENT);
  EXPECT_THAT(wb_last_error(), HasSubstr("config is null"));
  EXPECT_EQ(wb_router_forward(&call.config, nullptr, &call.outputs, nullptr), WB_INVALID_ARGUMENT);
  EXPECT_THAT(wb_last_error(), HasSubstr("inputs is null"));
  EXPECT_EQ(wb_router_forward(&call.config, &call.inputs, nullptr, nullptr), WB_INVALID_ARGUMENT);
  EXPECT_THAT(wb_last_error(), HasSubstr("outputs is null"));
  call.inputs.logits.data = nullptr;
  EXPECT_EQ(call.run(), WB_INVALID_ARGUMENT);
  EXPECT_THAT(wb_last_error(), HasSubstr("inputs.logits.data is null"));
  wb_group* group = nullptr;
  EXPECT_EQ(wb_group_create(2, 0, -1, &group), WB_INVALID_ARGUMENT);
  EXPECT_THAT(wb_last_error(), HasSubstr("ranks_per_node is -1"));
  EXPECT_EQ(wb_group_create(2, 0, 0, nullptr), WB_INVALID_ARGUMENT);
  EXPECT_EQ(wb_thread_pool_create(1, nullptr), WB_INVALID_ARGUMENT);
  EXPECT_EQ(wb_route_validate(nullptr, 0), WB_INVALID_ARGUMENT);
  EXPECT_EQ(wb_exchange_plan(nullptr, &call.memory.route, nullptr), WB_INVALID_ARGUMENT);
  EXPECT_EQ(wb_moe_layer_create(nullptr, nullptr, nullptr, nullptr, nullptr), WB_INVALID_ARGUMENT);
  EXPECT_EQ(wb_grouped_gemm(nullptr, nullptr), WB_INVALID_ARGUMENT);
  EXPECT_EQ(wb_fabric_abort(nullptr, "reason"), WB_INVALID_ARGUMENT);
}

TEST(CApiErrors, WrongStructSizesNameTheStructAndBothSizes) {
  RouterCall call;
  for (const std::uint64_t size : {std::uint64_t{0}, std::uint64_t{8}, std::uint64_t{sizeof(wb_router_config) + 8}, ~std::uint64_t{0}}) {
    call.config.struct_size = size;
    EXPECT_EQ(call.run(), WB_INVALID_ARGUMENT);
    EXPECT_THAT(wb_last_error(), AllOf(HasSubstr("config.struct_size is " + std::to_string(size)), HasSubstr(std::to_string(sizeof(wb_router_config)))));
  }
  EXPECT_EQ(wb_router_config_init(&call.config, 12), WB_INVALID_ARGUMENT);
  wb_route_stats stats{};
  EXPECT_EQ(wb_route_get_stats(&call.memory.route, 1, &stats), WB_INVALID_ARGUMENT);
  EXPECT_THAT(wb_last_error(), HasSubstr("stats.struct_size is 0"));
}

TEST(CApiErrors, EnumsRanksAndShapesOutOfRangeAreRefusedWithTheValue) {
  RouterCall call;
  call.config.score = 4;
  EXPECT_EQ(call.run(), WB_INVALID_ARGUMENT);
  EXPECT_THAT(wb_last_error(), HasSubstr("score is 4"));
  call.config.score = WB_SIGMOID;
  call.inputs.logits.rank = 5;
  EXPECT_EQ(call.run(), WB_INVALID_ARGUMENT);
  EXPECT_THAT(wb_last_error(), HasSubstr("rank is 5"));
  call.inputs.logits.rank = 2;
  call.inputs.logits.dtype = 99;
  EXPECT_EQ(call.run(), WB_INVALID_ARGUMENT);
  call.inputs.logits.dtype = WB_F32;
  call.inputs.logits.shape[0] = -1;
  EXPECT_EQ(call.run(), WB_INVALID_ARGUMENT);
  EXPECT_THAT(wb_last_error(), HasSubstr("shape[0] is -1"));
  call.inputs.logits.shape[0] = std::int64_t{1} << 62;
  call.inputs.logits.shape[1] = std::int64_t{1} << 62;
  EXPECT_EQ(call.run(), WB_INVALID_ARGUMENT);
}

// A refused call leaves the caller's memory as it was.
// A pointer into a device's memory must not be read as the host's.
TEST(CApiErrors, DeviceMemoryAndStreamsAreRefusedByACpuLibrary) {
  if (std::string(wb_build_info()).find("cuda archs: none") == std::string::npos) GTEST_SKIP() << "the library has CUDA kernels: tests/cuda/capi_test.cc";
  RouterCall call;
  auto stream = sized<wb_stream>();
  stream.device_type = WB_CUDA_DEVICE;
  stream.device_index = 3;
  EXPECT_EQ(wb_router_forward(&call.config, &call.inputs, &call.outputs, &stream), WB_UNSUPPORTED);
  EXPECT_STREQ(wb_last_error(), "stream: device_type is 1 (CUDA, device 3), this library computes on the CPU (0)");
  call.inputs.logits.device_type = WB_CUDA_DEVICE;
  EXPECT_EQ(call.run(), WB_UNSUPPORTED);
  EXPECT_THAT(wb_last_error(), HasSubstr("inputs.logits: device_type is 1 (CUDA, device 0)"));
  call.inputs.logits.device_type = WB_CPU;
  call.outputs.route.device_type = WB_CUDA_DEVICE;
  EXPECT_EQ(call.run(), WB_UNSUPPORTED);
  EXPECT_THAT(wb_last_error(), HasSubstr("outputs.route: device_type is 1"));
  EXPECT_EQ(call.memory.ids[0], -1);

  float value = -7;
  const auto on_device = [&](std::int32_t dtype, std::int32_t rank) {
    wb_tensor t{};
    t.data = &value, t.dtype = dtype, t.rank = rank, t.device_type = WB_CUDA_DEVICE;
    for (std::int32_t axis = 0; axis < rank; ++axis) t.shape[axis] = 1;
    return t;
  };
  auto args = sized<wb_grouped_gemm_args>();
  args.a = args.y = on_device(WB_F32, 2), args.weights = on_device(WB_F32, 3), args.offsets = on_device(WB_I32, 1);
  for (const auto product : {wb_grouped_gemm, wb_grouped_gemm_dgrad, wb_grouped_gemm_wgrad}) {
    EXPECT_EQ(product(&args, nullptr), WB_UNSUPPORTED);
    EXPECT_STREQ(wb_last_error(), "args.a: device_type is 1 (CUDA, device 0), this library computes on the CPU (0)");
  }
  EXPECT_EQ(wb_group_rows(nullptr, &args.offsets, nullptr, 1, nullptr), WB_UNSUPPORTED);
  EXPECT_THAT(wb_last_error(), HasSubstr("offsets: device_type is 1"));
  auto config = sized<wb_quant_config>();
  ASSERT_EQ(wb_quant_config_init(&config, sizeof config), WB_OK);
  auto codes = sized<wb_quantized>();
  codes.codes = codes.scales = on_device(WB_U8, 2);
  EXPECT_EQ(wb_quantize(&config, &args.a, nullptr, &codes, nullptr), WB_UNSUPPORTED);
  EXPECT_THAT(wb_last_error(), HasSubstr("x: device_type is 1"));
  EXPECT_EQ(wb_dequantize(&config, &codes, nullptr, &args.y, nullptr), WB_UNSUPPORTED);
  EXPECT_THAT(wb_last_error(), HasSubstr("y: device_type is 1"));
  EXPECT_EQ(value, -7);
}

TEST(CApiErrors, RefusedCallsWriteNothing) {
  RouterCall call;
  call.config.K = 5;
  call.memory.weights.assign(2, -7.0f);
  EXPECT_EQ(call.run(), WB_INVALID_ARGUMENT);
  EXPECT_THAT(wb_last_error(), AllOf(HasSubstr("5"), HasSubstr("4")));
  EXPECT_EQ(call.memory.ids, (std::vector<std::int16_t>{-1, -1}));
  EXPECT_EQ(call.memory.weights, (std::vector<float>{-7, -7}));
  wb_step_status status{};  // wrong size: refused before the routes are written
  call.config.K = 2;
  call.outputs.status = &status;
  EXPECT_EQ(call.run(), WB_INVALID_ARGUMENT);
  EXPECT_EQ(call.memory.weights, (std::vector<float>{-7, -7}));
}

TEST(CApiErrors, LastErrorIsPerThread) {
  EXPECT_EQ(wb_route_validate(nullptr, 0), WB_INVALID_ARGUMENT);
  const std::string here = wb_last_error();
  EXPECT_THAT(here, HasSubstr("route is null"));
  std::string fresh = "unset";
  std::thread([&fresh] { fresh = wb_last_error(); }).join();
  EXPECT_EQ(fresh, "");
  EXPECT_EQ(wb_last_error(), here);
}

TEST(CApiErrors, EveryStatusHasAName) {
  EXPECT_STREQ(wb_status_name(WB_OK), "ok");
  for (wb_status status = WB_INVALID_ARGUMENT; status <= WB_CUDA; ++status) EXPECT_STRNE(wb_status_name(status), "unknown error") << status;
  EXPECT_STREQ(wb_status_name(1000), "unknown error");
}

TEST(CApiErrors, DestroyTakesNull) {
  wb_group_destroy(nullptr);
  wb_thread_pool_destroy(nullptr);
  wb_exchange_destroy(nullptr);
  wb_dispatch_destroy(nullptr);
  wb_moe_layer_destroy(nullptr);
  wb_moe_step_destroy(nullptr);
  SUCCEED();
}

TEST(CApiErrors, TooManyExpertsForInt16IdsAreRefused) {
  RouteMemory memory(1, 1, 1);
  memory.route.E = 32769;
  EXPECT_EQ(wb_route_validate(&memory.route, 0), WB_INVALID_ARGUMENT);
  EXPECT_THAT(wb_last_error(), HasSubstr("int32"));
}

// A rank that never comes ends in an error within the timeout, and the text says who and where.
TEST(CApiErrors, AMissingRankIsATimeoutThatNamesIt) {
  on_ranks(
      2,
      [](wb_fabric* fabric, int rank) {
        if (rank != 0) return;
        EXPECT_EQ(wb_fabric_barrier(fabric), WB_TIMEOUT);
        EXPECT_THAT(wb_last_error(), AllOf(HasSubstr("wb_fabric_barrier"), HasSubstr("1")));
      },
      50);
}

TEST(CApiErrors, AnAbortReachesTheRanksThatWait) {
  on_ranks(2, [](wb_fabric* fabric, int rank) {
    if (rank == 0) {
      EXPECT_WB_OK(wb_fabric_abort(fabric, "no more coffee"));
    } else {
      EXPECT_EQ(wb_fabric_barrier(fabric), WB_PEER_FAILED);
      EXPECT_THAT(wb_last_error(), HasSubstr("no more coffee"));
    }
  });
}

// Version query and mismatch: a caller with other headers is told both versions.
TEST(CApiVersion, F29_VersionQueryAndHeaderMismatch) {
  EXPECT_STREQ(wb_version(), WB_VERSION_STRING);
  EXPECT_THAT(wb_build_info(), AllOf(HasSubstr(WB_VERSION_STRING), HasSubstr("cuda archs: "), HasSubstr("features: ")));
  EXPECT_WB_OK(wb_check_version(WB_ABI_VERSION, WB_VERSION_STRING));
  EXPECT_EQ(wb_check_version(WB_ABI_VERSION, "0.0.9"), WB_UNSUPPORTED);
  EXPECT_THAT(wb_last_error(), AllOf(HasSubstr("waybill.h"), HasSubstr("0.0.9"), HasSubstr(WB_VERSION_STRING)));
  EXPECT_EQ(wb_check_version(WB_ABI_VERSION + 1, WB_VERSION_STRING), WB_UNSUPPORTED);
  EXPECT_THAT(wb_last_error(), HasSubstr("ABI 2"));
  EXPECT_EQ(wb_check_version(WB_ABI_VERSION, nullptr), WB_INVALID_ARGUMENT);
}

TEST(CApiVersion, F29_ADeviceLibraryOfAnotherVersionIsNamed) {
  EXPECT_NO_THROW(check_component_version("the CUDA library", WB_VERSION_STRING));
  try {
    check_component_version("the CUDA library", "0.2.0");
    FAIL() << "a foreign version was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("the CUDA library"), HasSubstr("0.2.0"), HasSubstr(WB_VERSION_STRING)));
  }
}

}  // namespace
}  // namespace waybill::capi_testing
