// SPDX-License-Identifier: Apache-2.0
#include "waybill/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "error_text.h"
#include "temp_folder.h"

namespace waybill {
namespace {

namespace fs = std::filesystem;
using test::error_text;
using test::read_file;
using test::TempFolder;
using test::write_file;
using testing::HasSubstr;

// The state of field case F28: E = 4 experts filled with e + 1, router bias [0.1, 0.2, 0.3, 0.4], moments, load counters.
struct F28State {
  Tensor w1, m, v, bias, load;
  int P, rank;
  static constexpr std::int64_t kE = 4, kN = 3, kC = 5;

  F28State(int P_, int rank_, bool filled) : P(P_), rank(rank_) {
    const std::int64_t L = kE / P;
    w1 = Tensor::zeros(DType::kF32, {L, kN, kC});
    m = Tensor::zeros(DType::kF32, {L, kN, kC});
    v = Tensor::zeros(DType::kF32, {L, kN, kC});
    bias = Tensor::zeros(DType::kF32, {kE});
    load = Tensor::zeros(DType::kI64, {kE});
    if (!filled) return;
    for (std::int64_t i = 0; i < w1.size(); ++i) {
      const auto e = static_cast<float>(rank * L + i / (kN * kC));
      w1.as<float>()[i] = e + 1;
      m.as<float>()[i] = 0.1f * (e + 1) + 0.01f * static_cast<float>(i % (kN * kC));
      v.as<float>()[i] = 1e-30f * (e + 1);
    }
    const float b[] = {0.1f, 0.2f, 0.3f, 0.4f};
    std::memcpy(bias.as<float>(), b, sizeof b);
    for (int e = 0; e < 4; ++e) load.as<std::int64_t>()[e] = (std::int64_t{1} << 40) + e;
  }

  std::vector<CheckpointTensor> tensors() {
    const std::int64_t begin = rank * (kE / P);
    return {{"layers.0.moe.w1", w1, true, begin, kE},
            {"optimizer.m.layers.0.moe.w1", m, true, begin, kE},
            {"optimizer.v.layers.0.moe.w1", v, true, begin, kE},
            {"layers.0.moe.router_bias", bias, false, 0, 0},
            {"layers.0.moe.load", load, false, 0, 0}};
  }
};

CheckpointInfo info_at(std::int64_t step) {
  CheckpointInfo info;
  info.step = step;
  info.seed = 0xfedcba9876543210ull;
  info.tokens = 123456789012;
  info.receive_factor = 1.0 / 3;
  info.config = "name = \"x\"\n";
  return info;
}

void save_f28(const std::string& folder, int P, std::int64_t step, int D = 1, int keep = 10) {
  run_ranks(P * D, [&](Fabric& world) {
    F28State state(P, world.rank() % P, true);
    save_checkpoint(folder, info_at(step), state.tensors(), world, keep);
  });
}

std::string load_error(const std::string& path, const std::function<void(std::vector<CheckpointTensor>&)>& change = {}) {
  auto world = make_single_fabric();
  F28State state(1, 0, false);
  auto tensors = state.tensors();
  if (change) change(tensors);
  const std::string text = error_text([&] { load_checkpoint(path, tensors, *world); });
  // Nothing was changed by a refused load.
  EXPECT_TRUE(text == "no error" || (state.w1.as<float>()[0] == 0 && state.bias.as<float>()[0] == 0));
  return text;
}

TEST(CheckpointCases, F28_ExpertsBiasMomentsAndCountersComeBackAtEveryP) {
  TempFolder folder;
  save_f28(folder.str(), 2, 7);
  const std::string path = latest_checkpoint(folder.str());
  EXPECT_EQ(path, folder / "step_00000007");
  for (const int P : {1, 2, 4}) {
    SCOPED_TRACE(P);
    std::vector<std::vector<int>> owned(static_cast<std::size_t>(P));
    run_ranks(P, [&](Fabric& world) {
      F28State state(P, world.rank(), false);
      const F28State expected(P, world.rank(), true);
      const float* live_bias = state.bias.as<float>();
      load_checkpoint(path, state.tensors(), world);
      EXPECT_EQ(state.bias.as<float>(), live_bias);  // in place, not replaced
      const std::int64_t stride = F28State::kN * F28State::kC;
      for (std::int64_t e = 0; e < F28State::kE / P; ++e) {
        owned[static_cast<std::size_t>(world.rank())].push_back(static_cast<int>(state.w1.as<float>()[e * stride]));
      }
      const auto bytes = [](const Tensor& t) { return static_cast<std::size_t>(t.size()) * size_bytes(t.view().dtype); };
      EXPECT_EQ(std::memcmp(state.w1.view().data, expected.w1.view().data, bytes(state.w1)), 0);
      EXPECT_EQ(std::memcmp(state.m.view().data, expected.m.view().data, bytes(state.m)), 0);
      EXPECT_EQ(std::memcmp(state.v.view().data, expected.v.view().data, bytes(state.v)), 0);
      EXPECT_EQ(std::memcmp(state.load.view().data, expected.load.view().data, bytes(state.load)), 0);
      const std::uint32_t bias_bits[] = {0x3dcccccdu, 0x3e4ccccdu, 0x3e99999au, 0x3ecccccdu};  // fp32 of 0.1, 0.2, 0.3, 0.4
      EXPECT_EQ(std::memcmp(state.bias.view().data, bias_bits, sizeof bias_bits), 0);
    });
    std::vector<int> all;
    for (const auto& part : owned) all.insert(all.end(), part.begin(), part.end());
    EXPECT_EQ(all, (std::vector<int>{1, 2, 3, 4}));
    if (P == 2) {
      EXPECT_EQ(owned, (std::vector<std::vector<int>>{{1, 2}, {3, 4}}));
    }
    if (P == 4) {
      EXPECT_EQ(owned, (std::vector<std::vector<int>>{{1}, {2}, {3}, {4}}));
    }
    // And back: saved at this P, read at P = 2.
    TempFolder back;
    save_f28(back.str(), P, 8);
    run_ranks(2, [&](Fabric& world) {
      F28State state(2, world.rank(), false);
      const F28State expected(2, world.rank(), true);
      load_checkpoint(latest_checkpoint(back.str()), state.tensors(), world);
      EXPECT_EQ(std::memcmp(state.m.view().data, expected.m.view().data, static_cast<std::size_t>(state.m.size()) * 4), 0);
    });
  }
}

TEST(CheckpointCases, F28_NamesCarryTheGlobalExpertId) {
  TempFolder folder;
  save_f28(folder.str(), 2, 7);
  const auto index = nlohmann::json::parse(read_file(folder / "step_00000007/index.json"));
  std::vector<std::string> names;
  for (const auto& tensor : index["body"]["tensors"]) names.push_back(tensor["name"]);
  for (int e = 0; e < 4; ++e) {
    EXPECT_THAT(names, testing::Contains(fmt::format("layers.0.moe.experts.{}.w1", e)));
    EXPECT_THAT(names, testing::Contains(fmt::format("optimizer.m.layers.0.moe.experts.{}.w1", e)));
  }
  EXPECT_EQ(names.size(), 14u);
}

TEST(CheckpointCases, F28_MissingSurplusAndWrongShapeAreNamed) {
  TempFolder folder;
  save_f28(folder.str(), 2, 7);
  const std::string path = latest_checkpoint(folder.str());
  EXPECT_EQ(load_error(path), "no error");
  Tensor more = Tensor::zeros(DType::kF32, {5, 3, 5}), narrow = Tensor::zeros(DType::kF32, {4, 3, 4}), half = Tensor::zeros(DType::kBF16, {4, 3, 5});
  const std::string prefix = "checkpoint " + path + ": ";
  EXPECT_EQ(load_error(path, [&](auto& t) { t[0] = {"layers.0.moe.w1", more, true, 0, 5}; }), prefix + "tensor layers.0.moe.experts.4.w1 is missing");
  EXPECT_EQ(load_error(path,
                       [&](auto& t) {
                         t[0] = {"layers.0.moe.w1", narrow, true, 0, 4};
                       }),
            prefix + "tensor layers.0.moe.experts.0.w1 is f32 [3, 5], the model needs f32 [3, 4]");
  EXPECT_EQ(load_error(path,
                       [&](auto& t) {
                         t[0] = {"layers.0.moe.w1", half, true, 0, 4};
                       }),
            prefix + "tensor layers.0.moe.experts.0.w1 is f32 [3, 5], the model needs bf16 [3, 5]");
  EXPECT_EQ(load_error(path,
                       [&](auto& t) {
                         t[0] = {"layers.0.moe.w1", t[0].view.rows(0, 3), true, 0, 3};
                       }),
            prefix + "surplus tensor layers.0.moe.experts.3.w1 [3, 5]: the model has none of that name");
  EXPECT_EQ(load_error(path, [&](auto& t) { t.pop_back(); }), prefix + "surplus tensor layers.0.moe.load [4]: the model has none of that name");
  EXPECT_EQ(load_error(path, [&](auto& t) { t[3].name = "layers.0.moe.bias"; }), prefix + "tensor layers.0.moe.bias is missing");
}

TEST(CheckpointTest, RunStateComesBackExactly) {
  TempFolder folder;
  save_f28(folder.str(), 2, 7);
  const CheckpointInfo info = read_checkpoint_info(latest_checkpoint(folder.str())), expected = info_at(7);
  EXPECT_EQ(info.step, expected.step);
  EXPECT_EQ(info.seed, expected.seed);
  EXPECT_EQ(info.tokens, expected.tokens);
  EXPECT_EQ(info.receive_factor, expected.receive_factor);
  EXPECT_EQ(info.config, expected.config);
}

// With D = 2 replicas of every expert, each is written once, by the lowest rank that holds it.
TEST(CheckpointTest, ReplicatedExpertsAreWrittenOnce) {
  TempFolder folder;
  save_f28(folder.str(), 2, 1, 2);
  EXPECT_TRUE(fs::exists(folder / "step_00000001/data_0000.bin"));
  EXPECT_TRUE(fs::exists(folder / "step_00000001/data_0001.bin"));
  EXPECT_FALSE(fs::exists(folder / "step_00000001/data_0002.bin"));
  EXPECT_EQ(load_error(latest_checkpoint(folder.str())), "no error");
}

TEST(CheckpointTest, NewestStepsAreKept) {
  TempFolder folder;
  for (std::int64_t step = 1; step <= 5; ++step) save_f28(folder.str(), 1, step, 1, 2);
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder.str())) names.push_back(entry.path().filename().string());
  EXPECT_THAT(names, testing::UnorderedElementsAre("latest", "step_00000004", "step_00000005"));
}

TEST(CheckpointTest, SavingAStepAgainReplacesIt) {
  TempFolder folder;
  save_f28(folder.str(), 2, 3);
  save_f28(folder.str(), 1, 3);
  EXPECT_EQ(read_checkpoint_info(folder / "step_00000003").W, 1);
  EXPECT_FALSE(fs::exists(folder / "step_00000003/data_0001.bin"));
  EXPECT_EQ(load_error(latest_checkpoint(folder.str())), "no error");
}

TEST(CheckpointTest, DamageIsFoundAndNamed) {
  TempFolder folder;
  save_f28(folder.str(), 2, 7);
  const std::string path = latest_checkpoint(folder.str()), data = path + "/data_0000.bin", index = path + "/index.json";
  const std::string good_data = read_file(data), good_index = read_file(index);

  std::string bad = good_data;
  bad[3] = static_cast<char>(bad[3] ^ 0x10);
  write_file(data, bad);
  EXPECT_THAT(load_error(path), testing::AllOf(HasSubstr("data_0000.bin: tensor layers.0.moe.experts.0.w1 is corrupt"), HasSubstr("checksum")));

  write_file(data, good_data.substr(0, good_data.size() - 1));
  EXPECT_EQ(load_error(path), fmt::format("checkpoint {}: data_0000.bin has {} bytes, {} were saved", path, good_data.size() - 1, good_data.size()));

  fs::remove(data);
  EXPECT_EQ(load_error(path), "checkpoint " + path + ": data_0000.bin is missing");
  write_file(data, good_data);

  write_file(index, good_index.substr(0, good_index.size() / 2));
  EXPECT_THAT(load_error(path), HasSubstr("index.json is corrupt"));
  bad = good_index;
  bad.replace(bad.find("\"step\": 7"), 9, "\"step\": 9");
  write_file(index, bad);
  EXPECT_THAT(load_error(path), HasSubstr("index.json is corrupt: checksum"));
  fs::remove(index);
  EXPECT_EQ(load_error(path), "checkpoint " + path + ": index.json is missing");
  write_file(index, good_index);
  EXPECT_EQ(load_error(path), "no error");

  fs::remove(folder / "latest");
  EXPECT_THAT(error_text([&] { latest_checkpoint(folder.str()); }), HasSubstr("no checkpoint in " + folder.str()));
}

// An index whose checksum is right and whose content is not: nothing outside the checkpoint and the tensors is touched.
TEST(CheckpointTest, AnIndexThatLiesIsRefused) {
  TempFolder folder;
  save_f28(folder.str(), 1, 7);
  const std::string path = latest_checkpoint(folder.str()), file = path + "/index.json", good = read_file(file);
  const auto error_with = [&](const std::string& pointer, const nlohmann::json& value) {
    nlohmann::json root = nlohmann::json::parse(good);
    root["body"][nlohmann::json::json_pointer(pointer)] = value;
    const std::string body = root["body"].dump();
    root["crc"] = fmt::format("{:016x}", crc64(body.data(), body.size()));
    write_file(file, root.dump());
    return load_error(path);
  };
  EXPECT_EQ(error_with("/info/reruns", 5), "no error");  // the checksum is right
  EXPECT_THAT(error_with("/tensors/0/bytes", 4000), HasSubstr("4000 bytes, f32 [3, 5] has 60"));
  EXPECT_THAT(error_with("/tensors/0/shape", {1 << 20}), HasSubstr("f32 [1048576] has 4194304"));
  EXPECT_THAT(error_with("/tensors/0/shape", {std::int64_t{1} << 40, std::int64_t{1} << 40}), HasSubstr("is not one"));
  EXPECT_THAT(error_with("/tensors/0/shape", {-4}), HasSubstr("is not one"));
  EXPECT_THAT(error_with("/tensors/0/offset", -64), HasSubstr("are not inside data_0000.bin"));
  EXPECT_THAT(error_with("/tensors/0/offset", INT64_MAX), HasSubstr("are not inside data_0000.bin"));
  EXPECT_THAT(error_with("/tensors/0/file", "../step_00000007/data_0000.bin"), HasSubstr("is not in the list of files"));
  EXPECT_THAT(error_with("/files/..~1x", 5), HasSubstr("\"../x\" is not the name of a file of this checkpoint"));
  EXPECT_THAT(error_with("/files/data_0000.bin", -5), HasSubstr("file data_0000.bin has -5 bytes"));
  EXPECT_THAT(error_with("/tensors/0/dtype", "f31"), HasSubstr("unknown dtype f31"));
  EXPECT_THAT(error_with("/tensors/1/name", "layers.0.moe.load"), HasSubstr("two tensors are named layers.0.moe.load"));
  EXPECT_THAT(error_with("/info/P", 0), HasSubstr("saved with P = 0, W = 1"));
  EXPECT_THAT(error_with("/info/step", -1), HasSubstr("step -1"));
  EXPECT_THAT(error_with("/info/W", 5000000000), HasSubstr("5000000000 is out of range"));
  EXPECT_THAT(error_with("/info/seed", -1), HasSubstr("-1 is out of range"));
  EXPECT_THAT(error_with("/info/tokens", 1.5), HasSubstr("1.5 is not an integer"));
  EXPECT_THAT(error_with("/tensors/0/shape", {1e300}), HasSubstr("1e+300 is not an integer"));
  EXPECT_THAT(error_with("/tensors/0/shape", 4), HasSubstr("shape 4 is not a list"));
  EXPECT_THAT(error_with("/info/config", 5), HasSubstr("index.json is corrupt"));
  write_file(file, std::string(1000000, '['));
  EXPECT_THAT(load_error(path), HasSubstr("nested more than 16 deep"));
  for (const std::string name : {"../elsewhere", "/", ".", "other"}) {
    write_file(folder / "latest", name);
    EXPECT_THAT(error_text([&] { latest_checkpoint(folder.str()); }), HasSubstr("names \"" + name + "\", which is not a step"));
  }
}

TEST(CheckpointTest, VerificationReadsEveryByte) {
  TempFolder folder;
  save_f28(folder.str(), 2, 7);
  const std::string path = latest_checkpoint(folder.str()), data = path + "/data_0001.bin", good = read_file(data);
  const CheckpointContents contents = verify_checkpoint(path);
  EXPECT_EQ(contents.info.step, 7);
  EXPECT_EQ(contents.num_tensors, 3 * 4 + 2);
  EXPECT_EQ(contents.num_files, 2);
  EXPECT_EQ(contents.bytes, 3 * 4 * 15 * 4 + 4 * 4 + 4 * 8);
  for (std::size_t at = 0; at < good.size(); at += 7) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 1);
    write_file(data, bad);
    const bool padding = at % 64 >= 60;  // a tensor has 60 bytes, the next begins at a multiple of 64
    EXPECT_EQ(error_text([&] { verify_checkpoint(path); }) == "no error", padding) << at;
  }
}

TEST(CheckpointTest, EveryRankReportsTheSameFault) {
  TempFolder folder;
  save_f28(folder.str(), 2, 7);
  const std::string path = latest_checkpoint(folder.str()), data = path + "/data_0001.bin";
  std::string bad = read_file(data);
  bad.back() = static_cast<char>(bad.back() ^ 1);
  write_file(data, bad);
  std::vector<std::string> texts(2);
  run_ranks(2, [&](Fabric& world) {
    F28State state(2, world.rank(), false);
    texts[static_cast<std::size_t>(world.rank())] = error_text([&] { load_checkpoint(path, state.tensors(), world); });
    EXPECT_EQ(state.w1.as<float>()[0], 0);
  });
  EXPECT_THAT(texts[0], HasSubstr("optimizer.v.layers.0.moe.experts.3.w1 is corrupt"));
  EXPECT_EQ(texts[0], texts[1]);
  // Named is the rank that found it, by every rank and once.
  const std::string outside = error_text([&] {
    run_ranks(2, [&](Fabric& world) {
      F28State state(2, world.rank(), false);
      load_checkpoint(path, state.tensors(), world);
    });
  });
  EXPECT_THAT(outside, testing::StartsWith("rank 1: " + data + ": tensor"));
  EXPECT_EQ(outside, texts[0]);
}

TEST(CheckpointTest, ChecksumMatchesItsPublishedCheckValue) {
  EXPECT_EQ(crc64("123456789", 9), 0x995dc9bbdf1939faull);  // CRC-64/XZ
  EXPECT_EQ(crc64("6789", 4, crc64("12345", 5)), 0x995dc9bbdf1939faull);
  EXPECT_EQ(crc64("", 0), 0u);
}

}  // namespace
}  // namespace waybill
