// SPDX-License-Identifier: Apache-2.0
// Protocol buffers by hand: Event {1: double wall_time, 2: int64 step, 3: string file_version, 5: Summary}, Summary {1: Value}, Value {1: string tag,
// 2: float simple_value}. A record is: u64 length, its masked CRC, the bytes, their masked CRC; little-endian.
#include "tensorboard.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "waybill/error.h"

namespace waybill {
namespace {

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0x82f63b78u : 0u);
    table[i] = crc;
  }
  return table;
}
constexpr std::array<std::uint32_t, 256> kTable = make_table();

template <class T>
std::string little_endian(T value) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  std::string out;
  for (std::size_t i = 0; i < sizeof value; ++i) out += static_cast<char>(bits >> (8 * i) & 0xff);
  return out;
}

std::string varint(std::uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>((value & 0x7f) | 0x80);
  return out + static_cast<char>(value);
}

enum WireType : std::uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };
std::string key(std::uint32_t field, WireType type) { return varint(field << 3 | type); }
std::string bytes_field(std::uint32_t field, const std::string& bytes) { return key(field, kBytes) + varint(bytes.size()) + bytes; }

}  // namespace

std::uint32_t masked_crc32c(const std::string& bytes) {
  std::uint32_t crc = ~0u;
  for (const char c : bytes) crc = kTable[(crc ^ static_cast<unsigned char>(c)) & 0xff] ^ (crc >> 8);
  crc = ~crc;
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

TensorBoardWriter::TensorBoardWriter(const std::string& folder, double seconds) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const auto first = static_cast<std::int64_t>(seconds);
  for (std::int64_t name = first; path_.empty() || std::filesystem::exists(path_, error); ++name)
    path_ = fmt::format("{}/events.out.tfevents.{}.waybill", folder, name);
  file_.reset(std::fopen(path_.c_str(), "wb"));
  if (file_ == nullptr) WB_FAIL(ErrorCode::kIo, "cannot write {}: {}", path_, std::strerror(errno));
  put(key(1, kFixed64) + little_endian(seconds) + bytes_field(3, "brain.Event:2"));
}

void TensorBoardWriter::put(const std::string& event) {
  const std::string length = little_endian(static_cast<std::uint64_t>(event.size()));
  const std::string record = length + little_endian(masked_crc32c(length)) + event + little_endian(masked_crc32c(event));
  if (std::fwrite(record.data(), 1, record.size(), file_.get()) != record.size() || std::fflush(file_.get()) != 0)
    WB_FAIL(ErrorCode::kIo, "cannot write {}: {}", path_, std::strerror(errno));
}

void TensorBoardWriter::write(std::int64_t step, double seconds, std::span<const std::pair<std::string, double>> scalars) {
  std::string summary;
  for (const auto& [tag, value] : scalars) summary += bytes_field(1, bytes_field(1, tag) + key(2, kFixed32) + little_endian(static_cast<float>(value)));
  put(key(1, kFixed64) + little_endian(seconds) + key(2, kVarint) + varint(static_cast<std::uint64_t>(step)) + bytes_field(5, summary));
}

void TensorBoardWriter::write(const StepMetrics& m, double seconds) {
  std::vector<std::pair<std::string, double>> scalars{{"loss", m.loss},
                                                      {"aux_loss", m.aux_loss},
                                                      {"learning_rate", m.learning_rate},
                                                      {"grad_norm", m.grad_norm},
                                                      {"valid", m.valid ? 1 : 0},
                                                      {"step_ms", m.step_ms},
                                                      {"tokens_per_s", m.tokens_per_s},
                                                      {"expert_tflops", m.expert_tflops},
                                                      {"receive_factor", m.receive_factor},
                                                      {"peak_bytes", static_cast<double>(m.peak_bytes)}};
  for (std::size_t i = 0; i < kNumPhases; ++i) {
    if (m.times.seconds[i] > 0) scalars.emplace_back(fmt::format("phase_ms/{}", to_string(static_cast<Phase>(i))), m.times.seconds[i] * 1e3);
  }
  for (const LayerMetrics& layer : m.layers) {
    const auto add = [&](const char* name, double value) { scalars.emplace_back(fmt::format("layer_{:03}/{}", layer.layer, name), value); };
    add("max_over_mean", layer.max_over_mean), add("rank_imbalance", layer.rank_imbalance);
    if (layer.rank_rows.empty()) continue;
    const auto [least, most] = std::minmax_element(layer.rank_rows.begin(), layer.rank_rows.end());
    double sum = 0;
    for (const std::int64_t rows : layer.rank_rows) sum += static_cast<double>(rows);
    add("rank_rows_min", static_cast<double>(*least)), add("rank_rows_max", static_cast<double>(*most));
    add("rank_rows_mean", sum / static_cast<double>(layer.rank_rows.size()));
    add("expert_rows_min", static_cast<double>(layer.min_expert_rows)), add("expert_rows_max", static_cast<double>(layer.max_expert_rows));
    add("slot_demand", static_cast<double>(layer.slot_demand));
    for (std::size_t r = 0; r < layer.wait_us.size(); ++r) {
      for (std::size_t p = 0; p < layer.wait_us[r].size(); ++p) {
        if (p != r) add(fmt::format("wait_us/rank_{}_for_{}", r, p).c_str(), layer.wait_us[r][p]);
      }
    }
  }
  write(m.step, seconds, scalars);
}

}  // namespace waybill
