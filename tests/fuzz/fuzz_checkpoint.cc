// SPDX-License-Identifier: Apache-2.0
// A checkpoint folder with one part replaced by the fuzzer: the index as text, its body behind a right checksum, single values of a
// good body, the data file, `latest`. Either an Error with a text, and then no tensor has changed, or every byte loaded is the saved one and
// `waybill inspect checkpoint` finds nothing wrong. Or the lock of a run that is in use, with any text in it. The good run trains in a recipe.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fuzz_folder.h"
#include "fuzz_input.h"
#include "train/run_folder.h"
#include "waybill/checkpoint.h"
#include "waybill/error.h"

namespace {

using namespace waybill;
using nlohmann::json;

constexpr const char* kStep = "step_00000003";
constexpr float kUntouched = -7;

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// What a rank holds: a matrix, two experts and a vector of counts.
struct Tensors {
  Tensor w{DType::kF32, {4, 3}}, experts{DType::kBF16, {2, 5}}, load{DType::kI64, {3}};
  std::vector<CheckpointTensor> list() {
    return {{"layers.0.w", w, false, 0, 0}, {"layers.0.moe.w1", experts, true, 0, 2}, {"layers.0.moe.load", load, false, 0, 0}};
  }
  void fill(float value) {
    for (std::int64_t i = 0; i < w.size(); ++i) w.as<float>()[i] = value + static_cast<float>(i);
    std::memset(experts.view().data, static_cast<int>(value), 20);
    for (std::int64_t i = 0; i < load.size(); ++i) load.as<std::int64_t>()[i] = static_cast<std::int64_t>(value) + i;
  }
  bool operator==(const Tensors& other) const {
    return std::memcmp(w.view().data, other.w.view().data, 48) == 0 && std::memcmp(experts.view().data, other.experts.view().data, 20) == 0 &&
           std::memcmp(load.view().data, other.load.view().data, 24) == 0;
  }
};

// The good run folder, made once; every input replaces one file and puts it back.
struct Good {
  fuzz::Folder folder;
  RunConfig config;
  Tensors saved;
  std::string checkpoints = checkpoint_folder(folder.path()), step = checkpoints + "/" + kStep, index, data;
  json body;
  std::vector<json::json_pointer> places;  // every value of the body

  Good() {
    config.layer.moe.recipe.kind = Recipe::kNVFP4;
    resolve(config);
    saved.fill(3);
    CheckpointInfo info;
    info.step = 3;
    info.seed = config.train.seed;
    info.config = to_toml(config);
    info.model_config = model_toml(config);
    const auto world = make_single_fabric();
    save_checkpoint(checkpoints, info, saved.list(), *world, 2);
    index = read_file(step + "/index.json");
    data = read_file(step + "/data_0000.bin");
    body = json::parse(index)["body"];
    const json flat = body.flatten();
    for (const auto& item : flat.items()) places.emplace_back(item.key());
  }
};

std::string with_checksum(const json& body) {
  const std::string text = body.dump(-1, ' ', false, json::error_handler_t::replace);
  // The reader computes it of the parsed body: numbers may be written differently there.
  const std::string read = json::parse(text).dump();
  return json{{"format", "waybill-checkpoint"}, {"version", 1}, {"crc", fmt::format("{:016x}", crc64(read.data(), read.size()))}, {"body", json::parse(text)}}
      .dump();
}

json value_from(fuzz::Input& input) {
  static const std::int64_t integers[] = {0, 1, -1, 2, 3, 4, 5, 12, 20, 24, 48, 64, 127, 128, 255, 1 << 20, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN};
  static const char* const texts[] = {"",
                                      "data_0000.bin",
                                      "../step_00000003/data_0000.bin",
                                      "/dev/zero",
                                      "data_0001.bin",
                                      "f32",
                                      "bf16",
                                      "i64",
                                      "f8_e4m3",
                                      "layers.0.w",
                                      "layers.0.moe.experts.0.w1",
                                      "layers.0.moe.load",
                                      "0",
                                      "zz",
                                      "ffffffffffffffff",
                                      "-1"};
  switch (input.pick(8)) {
    case 0:
      return nullptr;
    case 1:
      return input.pick(texts);
    case 2:
      return input.pick(2) == 0;
    case 3:
      return json::array({input.pick(integers), input.pick(integers)});
    case 4:
      return json::object({{input.pick(texts), input.pick(integers)}});
    case 5:
      return input.take<double>();
    case 6:
      return input.take<std::int64_t>();
    default:
      return input.pick(integers);
  }
}

// Up to four values of the good body replaced, removed or added.
std::string changed_index(fuzz::Input& input, const Good& good) {
  json body = good.body;
  for (int n = 1 + input.pick(4); n > 0; --n) {
    const auto& place = good.places[static_cast<std::size_t>(input.take<std::uint8_t>()) % good.places.size()];
    try {
      if (input.pick(5) == 0)
        body.at(place.parent_pointer()).push_back(value_from(input));
      else
        body.at(place) = value_from(input);
    } catch (const json::exception&) {  // an earlier change took the place away
    }
  }
  return with_checksum(body);
}

std::string changed_data(fuzz::Input& input, std::string data) {
  const int change = input.pick(3);
  if (change == 0) return input.rest();
  if (change == 1) return data.substr(0, input.take<std::uint8_t>());
  while (input.size() > 0) data[static_cast<std::size_t>(input.take<std::uint8_t>()) % data.size()] = static_cast<char>(input.take<std::uint8_t>());
  return data;
}

void load(Good& good) {
  const auto world = make_single_fabric();
  Tensors tensors, untouched;
  tensors.fill(kUntouched);
  untouched.fill(kUntouched);
  std::int64_t step = -1;
  try {
    const ResumePoint point = check_resume(good.folder.path(), good.config, true);
    load_checkpoint(point.path, tensors.list(), *world);
    step = point.info.step;
  } catch (const Error& error) {
    if (error.what()[0] == '\0' || error.code() == ErrorCode::kInternal || !(tensors == untouched)) std::abort();
    return;
  }
  if (!(tensors == good.saved)) std::abort();
  const CheckpointContents contents = verify_checkpoint(latest_checkpoint(good.checkpoints));
  if (contents.bytes != 92 || contents.info.step != step) std::abort();
}

// What `waybill inspect checkpoint` does.
void inspect(const Good& good) {
  try {
    (void)verify_checkpoint(good.step);
  } catch (const Error& error) {
    if (error.what()[0] == '\0' || error.code() == ErrorCode::kInternal) std::abort();
  }
}

// A second process is refused in one printable line, whatever the first one wrote; without a holder the text is in nobody's way.
void take_lock(const Good& good, const std::string& text) {
  const std::string path = lock_path(good.folder.path());
  fuzz::write_file(path, text);
  const int holder = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (holder < 0 || flock(holder, LOCK_EX | LOCK_NB) != 0) std::abort();
  try {
    const auto lock = lock_run_folder(good.folder.path());
    std::abort();
  } catch (const Error& error) {
    const std::string line = error.what();
    if (line.find("is in use by ") == std::string::npos ||
        std::any_of(line.begin(), line.end(), [](char c) { return static_cast<unsigned char>(c) < ' ' || c == 127; }))
      std::abort();
  }
  close(holder);
  { const auto lock = lock_run_folder(good.folder.path()); }
  if (std::filesystem::exists(path)) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  static Good good;
  fuzz::Input input(bytes, size);
  std::string file = good.step + "/index.json";
  const std::string* original = &good.index;
  const std::string latest = std::string(kStep) + "\n";
  std::string text;
  const int part = input.take<std::uint8_t>();
  if (part >= 240) {
    take_lock(good, input.rest());
    return 0;
  }
  switch (part % 5) {
    case 0:
      text = input.rest();
      break;
    case 1: {
      const json body = json::parse(input.rest(), nullptr, false);
      text = body.is_discarded() ? "" : with_checksum(body);
      break;
    }
    case 2:
      text = changed_index(input, good);
      break;
    case 3:
      file = good.step + "/data_0000.bin";
      original = &good.data;
      text = changed_data(input, good.data);
      break;
    default:
      file = good.checkpoints + "/latest";
      original = &latest;
      text = input.rest();
  }
  fuzz::write_file(file, text);
  inspect(good);
  load(good);
  fuzz::write_file(file, *original);
  return 0;
}
