// SPDX-License-Identifier: Apache-2.0
// Exact sizes: the plan's sizes come to the host, and what has a row a slot grows to them.
#include <algorithm>

#include "core/cuda/cuda_error.h"
#include "core/cuda/scratch_buffer.h"
#include "exchange/cuda/exchange_params.h"
#include "moe/cuda/device_moe_impl.h"

namespace waybill::cuda {

void DeviceMoeLayer::Impl::make_slot_memory(Saved& saved) const {
  const SlotBytes most = bytes_of_slots(config, S, options);
  for (std::size_t i = 0; i < count(); ++i) {
    saved.slot_memory.push_back(
        {GrowableBuffer(keeps_h() ? most.h : 0, where.index), GrowableBuffer(keeps_a() ? most.a : 0, where.index), GrowableBuffer(), GrowableBuffer()});
    // A step's least: the router, which writes d_logits there, checks its pointers when a first step is rehearsed, before any size is known.
    if (keeps_h()) saved.slot_memory.back().h.grow(bytes_of_slots(config, 1, options).h);
  }
  saved.slots.assign(count(), 0);
  saved.headers = PinnedBuffer(count() * sizeof(HandleHeader)), saved.planned = std::make_unique<CudaEvent>(/*timing=*/false);
}

void DeviceMoeLayer::Impl::read_sizes(const Forward& f) {
  if (Rehearsal::is_on()) return;
  for (std::size_t i = 0; i < count(); ++i) {
    WB_TRY_CUDA(cudaMemcpyAsync(f.saved.headers.at<HandleHeader>(i * sizeof(HandleHeader)), exchange->header(f.saved.handle, static_cast<int>(i)),
                                sizeof(HandleHeader), cudaMemcpyDeviceToHost, f.stream));
  }
  f.saved.planned->record(f.stream);
}

// Everything that peers wait for in this forward so far is queued already: a wait here holds up nobody.
void DeviceMoeLayer::Impl::take_sizes(const Forward& f) {
  if (Rehearsal::is_on()) return;
  f.saved.planned->synchronize();
  for (std::size_t i = 0; i < count(); ++i) {
    const HandleHeader& header = *f.saved.headers.at<HandleHeader>(i * sizeof(HandleHeader));
    // The plan knows slots; how many rows their padding takes is the layout's, which may run still: at most alignment - 1 an expert. An invalid step (a lost
    // peer) has none. Every view keeps a row, so that no extent is 0.
    const std::int64_t num = header.valid != 0 ? header.S : 0, padded = num + (config.alignment - 1) * std::min(L, num);
    const std::int64_t fixed = header.valid != 0 ? L * (header.valid - 1) : 0;  // experts padded to their capacity
    f.saved.slots[i] = std::clamp<std::int64_t>(std::max(padded / config.alignment * config.alignment, fixed), 1, std::max<std::int64_t>(S, 1));
    const SlotBytes bytes = bytes_of_slots(config, f.saved.slots[i], options);
    slot_owner(f.saved, i, keeps_h()).h.grow(bytes.h), slot_owner(f.saved, i, keeps_a()).a.grow(bytes.a);
    slot_memory[i].y.grow(bytes.y), slot_memory[i].x.grow(bytes.x);
  }
}

std::size_t DeviceMoeLayer::slot_bytes(const DeviceMoeStep& step, int index) const {
  const Impl& m = *impl_;
  if (!m.options.exact_sizes) return bytes_of_slots(m.config, m.S, m.options).total();
  const auto i = static_cast<std::size_t>(index);
  const auto of = [](const SlotMemory& s) { return s.h.bytes() + s.a.bytes() + s.y.bytes() + s.x.bytes(); };
  return of(m.slot_memory.at(i)) + of(step.saved_->slot_memory.at(i));
}

}  // namespace waybill::cuda
