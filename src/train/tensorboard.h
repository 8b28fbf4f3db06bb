// SPDX-License-Identifier: Apache-2.0
// Scalars of a run as TensorBoard reads them: RUN/tensorboard/events.out.tfevents.SECONDS.waybill, TFRecords of Event messages.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "waybill/metrics.h"

namespace waybill {

class TensorBoardWriter {
 public:
  // Makes the folder; kIo with path and reason where it cannot. seconds: since 1970, of the file's name and its events.
  TensorBoardWriter(const std::string& folder, double seconds);
  void write(std::int64_t step, double seconds, std::span<const std::pair<std::string, double>> scalars);  // flushed; kIo on failure
  void write(const StepMetrics& metrics, double seconds);
  const std::string& path() const { return path_; }

 private:
  void put(const std::string& event);
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

// The check sum of TFRecords: CRC-32C (Castagnoli), rotated and shifted.
std::uint32_t masked_crc32c(const std::string& bytes);

}  // namespace waybill
