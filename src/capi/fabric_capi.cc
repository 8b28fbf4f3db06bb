// SPDX-License-Identifier: Apache-2.0
// Groups of ranks in this process, driven by the caller's threads.
#include "handles.h"

using namespace waybill;
using namespace waybill::capi;

wb_status wb_group_create(int32_t P, int64_t timeout_ms, int32_t ranks_per_node, wb_group** group) noexcept {
  return guarded([&] {
    wb_group*& target = required(group, "group");
    WB_CHECK(P >= 1 && P <= 1024, "P is {}, allowed are 1 to 1024", P);
    WB_CHECK(timeout_ms >= 0, "timeout_ms is {}, it must not be negative (0 = default)", timeout_ms);
    WB_CHECK(ranks_per_node >= 0, "ranks_per_node is {}, it must not be negative (0 = one node)", ranks_per_node);
    FabricOptions options;
    options.ranks_per_node = ranks_per_node;
    if (timeout_ms > 0) options.timeout = std::chrono::milliseconds(timeout_ms);
    auto created = std::make_unique<wb_group>();
    for (auto& fabric : make_thread_group(P, options)) created->ranks.push_back(std::make_unique<wb_fabric>(wb_fabric{std::move(fabric)}));
    target = created.release();
  });
}

void wb_group_destroy(wb_group* group) noexcept { delete group; }

wb_status wb_group_fabric(wb_group* group, int32_t rank, wb_fabric** fabric) noexcept {
  return guarded([&] {
    const auto& ranks = required(group, "group").ranks;
    WB_CHECK(rank >= 0 && static_cast<std::size_t>(rank) < ranks.size(), "rank is {}, the group has ranks 0 to {}", rank, ranks.size() - 1);
    required(fabric, "fabric") = ranks[static_cast<std::size_t>(rank)].get();
  });
}

namespace {

class CallbackTransport final : public FabricTransport {
 public:
  explicit CallbackTransport(const wb_fabric_transport& callbacks) : callbacks_(callbacks) {}
  void all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive, std::span<const std::int64_t> receive_bytes) override {
    char text[1024] = "";
    if (callbacks_.all_to_all(callbacks_.user, send, send_bytes.data(), receive, receive_bytes.data(), text, sizeof(text)) == 0) return;
    text[sizeof(text) - 1] = 0;
    WB_FAIL(ErrorCode::kPeerFailed, "{}", text[0] == 0 ? "no reason given" : text);
  }

 private:
  wb_fabric_transport callbacks_;
};

}  // namespace

wb_status wb_fabric_create(const wb_fabric_transport* transport, int32_t P, int32_t rank, int32_t ranks_per_node, wb_fabric** fabric) noexcept {
  return guarded([&] {
    wb_fabric*& target = required(fabric, "fabric");
    const wb_fabric_transport given = read_struct(transport, "transport");
    WB_CHECK(given.all_to_all != nullptr, "transport.all_to_all is null");
    WB_CHECK(P >= 1 && P <= 1024, "P is {}, allowed are 1 to 1024", P);
    FabricOptions options;
    options.ranks_per_node = ranks_per_node;
    target = new wb_fabric{make_caller_fabric(std::make_unique<CallbackTransport>(given), P, rank, options)};
  });
}

void wb_fabric_destroy(wb_fabric* fabric) noexcept { delete fabric; }

wb_status wb_fabric_abort(wb_fabric* fabric, const char* reason) noexcept {
  return guarded([&] { required(fabric, "fabric").fabric->abort(&required(reason, "reason")); });
}

wb_status wb_fabric_barrier(wb_fabric* fabric) noexcept {
  return guarded([&] { required(fabric, "fabric").fabric->barrier("wb_fabric_barrier"); });
}

namespace {

template <class T>
wb_status all_reduce(wb_fabric* fabric, T* values, int64_t count, const char* phase) noexcept {
  return guarded([&] {
    WB_CHECK(count >= 0 && (values != nullptr || count == 0), "values is null or count negative (count = {})", count);
    required(fabric, "fabric").fabric->all_reduce(std::span<T>(values, static_cast<std::size_t>(count)), ReduceOp::kSum, phase);
  });
}

}  // namespace

wb_status wb_fabric_all_reduce_i64(wb_fabric* fabric, int64_t* values, int64_t count) noexcept {
  return all_reduce(fabric, values, count, "wb_fabric_all_reduce_i64");
}

wb_status wb_fabric_all_reduce_f32(wb_fabric* fabric, float* values, int64_t count) noexcept {
  return all_reduce(fabric, values, count, "wb_fabric_all_reduce_f32");
}
