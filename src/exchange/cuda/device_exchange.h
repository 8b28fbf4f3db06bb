// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine on GPUs: the contract of waybill/exchange.h with device memory, no host wait and fixed budgets. One object serves
// the ranks that one launch stands for: all virtual ranks of a GPU (cuda_local), or the one rank of a process (windows of other processes).
//
// Every call queues work on `stream` and returns. All ranks of the group make the same calls in the same order; calls on one handle's
// windows must be ordered on the stream. Everything can be captured in a graph; what changes between replays is the contents of the routes
// and rows. Results are bit-equal on repeat and equal to the CPU engine's: the same rows, the same layout, the same order of sums.
//
//   plan(handle, routes)             counts, ids and weights cross the links; offsets and the verdict of the budgets
//   layout(handle)                   expert order of what arrived
//   dispatch(handle, x, window)      rows to their final place; returns (on the stream) when the peers' rows are here
//   permute(handle, rows, y), unpermute_reduce(handle, y, z), unpermute_backward(...)   between rows and expert order
//   combine(handle, window, out)     partials of all ranks added in rank order
//   return_slot_values(handle, ...)  per-slot scalars back to [T, K]
// The gradient of dispatch is combine, the gradient of combine is dispatch, with the same handle.
//
// This class is the exchange of ranks that reach each other's memory. Where a group has several nodes, NodeExchange overrides the calls that cross between
// them, and everything else is this class within the node; make_exchange() (exchange/cuda/make_exchange.h) takes the one that the group needs. What goes
// within a node alone is refused there with kUnsupported, by name: plan_map(), chunks, pulls, pushed partials, own rows apart, rows with scales.
//
// Where one thread queues for ranks on several GPUs, set CUDA_MODULE_LOADING=EAGER before CUDA starts: a kernel that is loaded at its first launch waits for
// the device, and with it for a peer that waits for this launch. With a thread a GPU no wait is circular; there, leave it LAZY where cuBLASLt is called
// (DeviceMoeLayer): under EAGER a part of that library that is loaded late goes onto all GPUs of the process at once, one that waits for this thread
// among them. Kernels that wait for peers need their CTAs resident together: no kernel of another
// stream may wait for another rank at the same time (tuning().fused_plan = false lifts that for plan()).
//
// Faults: an exceeded budget (on any rank) makes the handle invalid on every rank: nothing moves, R = S = 0, out = 0, and the status word of
// the rank that was exceeded holds demand and capacity. A peer that does not come ends in kStatusTimeout on every rank; reset() then starts
// the group anew. A token that names an expert twice sets kStatusDuplicateId. Bad arguments throw before anything is queued.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/cuda/device_buffer.h"
#include "core/cuda/status_device.h"
#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/map_windows.h"
#include "exchange/cuda/tuning.h"
#include "exchange/tuning_table.h"
#include "waybill/exchange.h"

namespace waybill::cuda {

// Books `bytes` at one offset of every arena of the group.
using BookWindow = std::function<std::uint64_t(const std::string& name, std::size_t bytes)>;

// Room for plans from dense maps, plan_map(): 5 E bytes a token of the group.
struct MapRoom {
  bool enabled = false;
  std::int64_t padded_slots = 0;  // experts are padded to up to so many slots in all (pad to capacity)
};

// Offsets that the ranks of a group share; booked once for any number of DeviceExchange objects with the same config.
struct ExchangeWindows {
  std::uint64_t control = 0, counts = 0, row_meta = 0, slot_ids = 0, slot_weights = 0, slot_values = 0, tile_counts = 0, expert_tiles = 0;
  MapWindows map;
};

// Bytes of all of them, for sizing an arena (without row windows), and of a row window.
std::size_t exchange_window_bytes(const ExchangeConfig& config, int P, const MapRoom& map = {});
std::size_t row_window_bytes(const ExchangeConfig& config, int P, std::size_t row_bytes);   // row_budget rows
std::size_t slot_window_bytes(const ExchangeConfig& config, int P, std::size_t row_bytes);  // push combine: T_max * min(P, K) rows
ExchangeWindows book_exchange_windows(const ExchangeConfig& config, int P, const BookWindow& book, const MapRoom& map = {});

// A rank's route in device memory. ids [T, K] int16 (int32 where route_id_dtype(E) says so), weights [T, K] f32.
struct DeviceRoute {
  const void* ids = nullptr;
  const float* weights = nullptr;
  std::int64_t T = 0;
};

// A rank's tokens for plan_map(): a route, whose rows may name an expert twice (the weights are summed) and have more than 128 columns, or a map.
struct DeviceMap {
  DeviceRoute route;             // or null ids
  const float* cells = nullptr;  // [T, E] f32, 0 = not routed
  std::int64_t T = 0;
  const std::int32_t* capacity = nullptr;  // [1] slots that this rank pads each expert to; null: none (on all ranks or on none)
};

// Rows in device memory: [rows, columns] with 16-byte aligned rows and contiguous columns.
struct DeviceRows {
  void* data = nullptr;
  std::int64_t stride = 0;  // elements; 0 = columns
};

// What plan and layout leave behind on one rank, copied to the host (tests, eager callers). Waits for the stream.
struct HostHandle {
  bool valid = false;
  std::int64_t max_slot_demand = 0, max_row_demand = 0;
  ReceiveLayout layout;
  std::vector<RowEntry> entries;  // [T, D]
};

// The plans of the launch's ranks: owned device memory, sized by the budgets. Kept until the backward pass has used them.
class DeviceHandle {
 public:
  DeviceHandle() = default;

 private:
  friend class DeviceExchange;
  friend class NodeExchange;
  std::vector<DeviceBuffer> memory_;  // [ranks of the launch]
  std::vector<std::int64_t> T_;
  std::vector<DeviceBuffer> between_;  // several nodes: which tokens go to which (NodePlan); T_ is that of the node's own plan then
  std::vector<std::int64_t> own_T_;
};

class DeviceExchange {
 public:
  // config.T_max must be given; H a multiple of 8. ranks: those of this launch, all on `device`. Refuses with the values: what
  // validate(config) refuses, K > 128, budgets past 2^31 - 1, hierarchy two_level (flat only), a launch that the GPU cannot hold.
  DeviceExchange(const ExchangeConfig& config, const ExpertPlacement& placement, const LocalRanks& ranks, int device, const ExchangeWindows& windows,
                 const ExchangeTuning& tuning = {}, const MapRoom& map = {});
  virtual ~DeviceExchange() = default;
  DeviceExchange(const DeviceExchange&) = delete;
  DeviceExchange& operator=(const DeviceExchange&) = delete;

  virtual int num_nodes() const { return 1; }
  virtual int node() const { return 0; }
  const ExchangeConfig& config() const { return config_; }  // several nodes: node_config()
  ReceiveBudget budget() const { return budget_; }
  int num_ranks() const { return params_.ranks.count; }
  int num_peers() const { return params_.shape.P; }  // ranks that reach each other, this launch's among them
  int rank(int index) const { return params_.ranks.rank[index]; }
  int entries_per_token() const { return params_.shape.D; }
  ExchangeTuning& tuning() { return tuning_; }

  virtual DeviceHandle make_handle() const;  // allocates
  // Spans hold one element a rank of the launch.
  virtual void plan(DeviceHandle& handle, std::span<const DeviceRoute> routes, cudaStream_t stream) const;
  void layout(const DeviceHandle& handle, cudaStream_t stream) const;

  // The same plan the older way (MapRoom): every rank sends its [T, E] map and weights to every rank, and each builds its plan from all of them. A row's
  // slots are then in expert order, not in the order of k. Calls behind it are the same, but for return_map_values(): d_map [T, E] f32, 0 where nothing
  // was routed; where routes were given, return_map_routes() takes [T, K] out of it.
  void plan_map(DeviceHandle& handle, std::span<const DeviceMap> maps, cudaStream_t stream) const;
  // Own cells [T, E] bytes of the last plan_map() of rank `index`; what they hold goes to that plan's return_map_values().
  const std::uint8_t* map_cells(int index) const;
  void return_map_values(const DeviceHandle& handle, std::span<const std::uint8_t* const> cells, std::span<const float* const> values,
                         std::span<float* const> d_map, cudaStream_t stream) const;
  void return_map_routes(std::span<const DeviceRoute> routes, std::span<const float* const> d_map, std::span<float* const> d_weights,
                         cudaStream_t stream) const;
  bool plans_maps() const { return map_.enabled; }

  // Rows [T, H] of `dtype` (f32, bf16, or one byte an element: f8) to row window `window`. scales: f8 only, [T, scale_bytes] raw bytes to
  // `scale_window`. after_plan: this is the first dispatch of a plan made since every rank used the window last (no handshake is needed then).
  // With a handshake the window may also be the one whose partials this stream's last combine() has read.
  struct Scales {
    std::span<const DeviceRows> rows;  // stride in bytes
    std::int64_t bytes = 0;            // of a row, a multiple of 16
    std::uint64_t window = 0;
  };
  void dispatch(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> x, std::uint64_t window, bool after_plan, cudaStream_t stream) const;
  virtual void dispatch(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> x, std::uint64_t window, const Scales& scales, bool after_plan,
                        cudaStream_t stream) const;
  // The same in chunks of tokens, for permute_arriving(): rows of other ranks only; f32, bf16 or f8 without scales; supports_chunks().
  void dispatch_chunks(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> x, std::uint64_t window, bool after_plan,
                       cudaStream_t stream) const;
  bool supports_chunks() const;  // sm_90, few enough ranks in this launch, one node
  // The same by pull, for comparison: x lies in a window of [T_max, H]. Needs layout().
  void dispatch_pull(const DeviceHandle& handle, DType dtype, std::uint64_t x_window, std::uint64_t window, cudaStream_t stream) const;

  // out [T, H] (f32 or bf16) = sum over ranks of the partials [R, H] in `window`; partials(): their type. base: [T, H] of type wire(),
  // contiguous, a rank: a part that crossed no link, added last; or empty. out of an invalid handle is 0 all the same.
  virtual void combine(const DeviceHandle& handle, std::uint64_t window, DType out_dtype, std::span<const DeviceRows> out, cudaStream_t stream,
                       std::span<const void* const> base = {}) const;
  // unpermute_reduce() into `window` and combine() from it, overlapped: one launch where the GPU allows, else the two. The same bits. dtype: of y
  // and of out. The window's former partials must have been pulled on this stream's order, as for unpermute_reduce(z_in_window). num_sms: how many its one
  // launch may take, beside kernels of another stream that wait for no rank; 0: all.
  void reduce_and_combine(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> y, bool weighted, std::uint64_t window,
                          std::span<const DeviceRows> out, cudaStream_t stream, std::span<const void* const> base = {}, int num_sms = 0) const;
  // One rank is the whole group: from y to out [T, H] (f32 or bf16) at once, without partials, base (f32, rows of H) among it; no dispatch is needed before,
  // see list_tokens(). The bits of unpermute_reduce() and combine(). columns: as permute(); base then points to its first column, too. num_sms: as above.
  void reduce_home(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> y, DType out_dtype, std::span<const DeviceRows> out,
                   cudaStream_t stream, std::span<const void* const> base = {}, std::int64_t columns = 0, int num_sms = 0) const;
  // One rank: slot_rows() of handles that are laid out from here on name tokens instead of received rows, so that matmuls read x [T, H] itself.
  void list_tokens();
  // The same by push into slots [T_max * D, H] of `slots`, then a local sum. Needs layout().
  void combine_push(const DeviceHandle& handle, std::uint64_t window, std::uint64_t slots, DType out_dtype, std::span<const DeviceRows> out,
                    cudaStream_t stream) const;
  DType partials() const;                            // bf16 where combine_wire says so and P > 1, else f32; several nodes: f32
  virtual DType wire() const { return partials(); }  // of what links carry home, and of base; several nodes: what goes between them

  // values [S_padded] f32 in expert order -> d_weights [T, K]. routes as given to plan().
  virtual void return_slot_values(const DeviceHandle& handle, std::span<const DeviceRoute> routes, std::span<const float* const> values,
                                  std::span<float* const> d_weights, cudaStream_t stream) const;

  // `bytes` from each rank of the launch (send) to the rank of its index on every other node: part m of receive [num_nodes()] comes from node m, the own
  // part is left alone. One node: nothing.
  virtual void send_between_nodes(std::span<const void* const> send, std::span<void* const> receive, std::size_t bytes, cudaStream_t stream) const;

  // Local steps; need layout(). y [S_padded, H] of `dtype` (f32 or bf16; permute takes any). columns: of a block of columns, whose first element the rows
  // point to (strides are then needed); 0: all of H.
  void permute(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> rows, std::span<const DeviceRows> y, cudaStream_t stream,
               std::int64_t columns = 0) const;
  // The same in two halves: rows that a rank sent to itself come straight from its x [T, H], so that they can move while dispatch fills the
  // window (after layout(), on another stream); the others and the padding follow dispatch.
  // On one rank all rows are own ones, and padding is cleared; columns: as permute().
  void permute_own(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> x, std::span<const DeviceRows> y, cudaStream_t stream,
                   std::int64_t columns = 0) const;
  void permute_others(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> rows, std::span<const DeviceRows> y, cudaStream_t stream) const;
  // The whole permute beside dispatch_chunks(): own rows from x [T, H], each other row as soon as its chunk of tokens has come. Call it after
  // layout() and dispatch_chunks(), on another stream, exactly once for each dispatch_chunks(), and join the streams before the next plan or dispatch.
  void permute_arriving(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> x, std::span<const DeviceRows> rows, std::span<const DeviceRows> y,
                        cudaStream_t stream) const;
  // z [R, H] of z_dtype. z_in_window: z is memory that combine() reads on peers; the kernel waits until they have read what it held.
  void unpermute_reduce(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> y, bool weighted, DType z_dtype, std::span<const DeviceRows> z,
                        bool z_in_window, cudaStream_t stream, std::int64_t columns = 0) const;
  // dy (may be y) and d_weights [S_padded] (null pointers: none) from dz [R, H] of dz_dtype.
  void unpermute_backward(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> y, bool weighted, DType dz_dtype, std::span<const DeviceRows> dz,
                          std::span<const DeviceRows> dy, std::span<float* const> d_weights, cudaStream_t stream) const;

  // Pointers into a handle of rank `index` of the launch: its header; for grouped matmuls offsets [L + 1], counts [L], rows of slots [S_padded],
  // weights [S_padded], all on the device.
  const HandleHeader* header(const DeviceHandle& handle, int index) const;
  const std::int32_t* expert_offsets(const DeviceHandle& handle, int index) const;
  const std::int32_t* expert_counts(const DeviceHandle& handle, int index) const;
  const std::int32_t* slot_rows(const DeviceHandle& handle, int index) const;
  const float* slot_weights(const DeviceHandle& handle, int index) const;

  // A plan in memory of the caller's, for launches with one rank: handle_bytes() of it, aligned to 16. Both queue a copy; T: tokens of the plan.
  virtual std::size_t handle_bytes() const { return handle_bytes_; }
  virtual void save(const DeviceHandle& handle, void* to, cudaStream_t stream) const;
  virtual void restore(DeviceHandle& handle, const void* from, std::int64_t T, cudaStream_t stream) const;
  // [P] nanoseconds on the device: how long the exchange's kernels of rank `index` of the launch have waited for each rank since reset(). Kernels add to it;
  // reading it needs no wait. Waits that end at the first look count 0; of waits in chunks the first warp's count.
  const unsigned long long* wait_ns(int index) const;

  HostHandle read(const DeviceHandle& handle, int index, cudaStream_t stream) const;
  StatusWord status(int index, cudaStream_t stream) const;  // waits
  void clear_status(cudaStream_t stream) const;
  // After a timeout, on every rank, with no kernel running anywhere: flags, epochs and tickets to 0.
  void reset() const;

 protected:
  const ExchangeParams& params() const { return params_; }
  RowType row_type(const char* what, DType dtype) const;
  // What goes within one NVLink domain only.
  void check_one_node(const char* call) const;

 private:
  template <class T>
  const T* part(const DeviceHandle& handle, int index, std::uint64_t offset) const;
  ExchangeParams with(const DeviceHandle& handle) const;
  int spinning_ctas(const void* kernel, int threads, std::size_t smem, int wanted) const;
  RowTuning tuned(std::int64_t row_bytes) const;  // the table's row with what tuning() says instead
  int chunk_ctas(std::int64_t row_bytes) const;
  bool ring_holds_slots() const;
  void queue_dispatch(const ExchangeParams& q, DispatchArgs args, int wanted, cudaStream_t stream) const;
  int local_ctas(int per_sm = 2) const;
  // What a rank of this launch receives where routes are spread evenly: as much as the host knows of a plan.
  struct Expected {
    std::int64_t rows, slots;
  };
  Expected expect(const DeviceHandle& handle) const;
  void set_base(ExchangeParams& q, std::span<const void* const> base) const;
  void permute_part(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> rows, std::span<const DeviceRows> y, PermutePart part,
                    std::int64_t columns, cudaStream_t stream) const;
  DispatchArgs dispatch_args(DType dtype, std::span<const DeviceRows> x, std::uint64_t window, const Scales& scales) const;

  ExchangeConfig config_;
  MapRoom map_;
  MapWindows map_windows_;
  ReceiveBudget budget_;
  int device_;
  int num_sms_ = 0, max_smem_ = 0, compute_major_ = 0, plan_fused_ctas_ = 0, layout_fused_ctas_ = 0;
  ExchangeTuning tuning_;
  ExchangeParams params_{};
  std::size_t handle_bytes_ = 0;
  DeviceBuffer rank_table_, local_table_;
  std::vector<DeviceStatus> status_;
};

}  // namespace waybill::cuda
