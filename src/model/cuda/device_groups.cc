// SPDX-License-Identifier: Apache-2.0
// DeviceLanguageModel's rank groups: which ranks exchange tokens in which windows, and the MoE layers that are made for them.
#include "core/cuda/cuda_error.h"
#include "model/cuda/device_language_model.h"
#include "model/cuda/device_memory.h"
#include "waybill/log.h"

namespace waybill::cuda {

std::vector<MoeConfig> DeviceLanguageModel::moe_configs() const {
  std::vector<MoeConfig> configs;
  for (const LayerConfig& layer : config_.layers)
    if (layer.is_moe) configs.push_back(device_moe_config(config_, layer, options_));
  return configs;
}

void DeviceLanguageModel::make_experts() {
  const std::vector<MoeConfig> configs = moe_configs();
  if (configs.empty()) return;
  waits_before_.assign(configs.size(), {});
  const MoeForm form = choose_moe_form(config_, W_, options_);
  if (form.resend_rows) {
    log(LogLevel::kInfo, fmt::format("MoE layers send rows again in backward{} to fit {} bytes of a GPU",
                                     form.column_blocks > 1 ? fmt::format(" and work in {} blocks of columns", form.column_blocks) : "", options_.memory));
  }
  std::vector<std::size_t> bytes;
  std::vector<DeviceMoeOptions> forms;
  std::size_t next = 0;
  for (const LayerConfig& layer : config_.layers) {
    if (!layer.is_moe) continue;
    forms.push_back(moe_options(configs[next], form));
    bytes.push_back(DeviceMoeLayer::arena_bytes(configs[next++], layer.P, forms.back()));
  }
  for (const auto& part : parts_) part->drop_experts();
  make_groups(bytes);
  for (const auto& part : parts_) part->make_experts(configs, forms, launches_of(*part));
}

// layer_bytes: what a MoE layer books, by MoE layer.
void DeviceLanguageModel::make_groups(const std::vector<std::size_t>& layer_bytes) {
  groups_.clear();
  std::map<int, std::size_t> bytes;  // by P
  std::size_t next = 0;
  for (const LayerConfig& layer : config_.layers) {
    if (layer.is_moe) bytes[layer.P] += layer_bytes[next++];
  }
  const int each = W_ / static_cast<int>(parts_.size());
  bool spans_all = false;
  for (const auto& [P, size] : bytes) {
    spans_all = spans_all || P == W_;
    for (int g = 0; g < W_ / P; ++g) {
      std::vector<int> devices;
      for (int d = g * P / each; d * each < (g + 1) * P; ++d) devices.push_back(options_.devices[static_cast<std::size_t>(d)]);
      groups_[{P, g}].ranks = std::make_unique<CudaLocalGroup>(P, devices, size);
    }
  }
  if (parts_.size() > 1 && !spans_all && world_ == nullptr) world_ = std::make_unique<CudaLocalGroup>(W_, options_.devices, 256);
}

// Ranks of a group share offsets: the first GPU's layers book, those of the others take the same list.
std::vector<std::vector<DevicePart::Launch>> DeviceLanguageModel::launches_of(const DevicePart& part) {
  std::vector<std::vector<DevicePart::Launch>> all;
  std::map<std::pair<int, int>, std::shared_ptr<std::size_t>> taken;  // windows of a group that this GPU has had
  for (const LayerConfig& layer : config_.layers) {
    if (!layer.is_moe) continue;
    std::vector<DevicePart::Launch>& launches = all.emplace_back();
    for (int g = 0; g < part.share().num_groups(layer.P); ++g) {
      const std::pair<int, int> key(layer.P, part.share().first_group(layer.P) + g);
      std::shared_ptr<std::size_t>& next = taken[key];
      if (next == nullptr) next = std::make_shared<std::size_t>(0);
      RankGroup& group = groups_.at(key);
      launches.push_back({local_ranks(*group.ranks, part.share().device), [&group, next](const std::string& name, std::size_t size) {
                            if (*next == group.windows.size()) group.windows.push_back(group.ranks->window(name, size));
                            return group.windows.at((*next)++);
                          }});
    }
  }
  return all;
}

}  // namespace waybill::cuda
