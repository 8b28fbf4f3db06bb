// SPDX-License-Identifier: Apache-2.0
#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "waybill/data.h"
#include "waybill/error.h"
#include "waybill/random.h"

namespace waybill {
namespace {

constexpr std::uint64_t kSampleStream = 0x73616d70;

}  // namespace

std::int32_t pick_token(std::span<const float> logits, double temperature, double uniform) {
  const auto largest = std::max_element(logits.begin(), logits.end());
  if (temperature <= 0) return static_cast<std::int32_t>(largest - logits.begin());
  double total = 0;
  for (const float x : logits) total += std::exp((static_cast<double>(x) - *largest) / temperature);
  double left = uniform * total;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    left -= std::exp((static_cast<double>(logits[i]) - *largest) / temperature);
    if (left < 0) return static_cast<std::int32_t>(i);
  }
  return static_cast<std::int32_t>(largest - logits.begin());  // rounding at the very end of the range
}

std::vector<std::int32_t> continue_tokens(LanguageModel& model, Fabric& world, std::vector<std::int32_t> prompt, std::int64_t count, double temperature,
                                          std::uint64_t seed) {
  const std::int64_t vocab = model.config().vocab, seq_len = model.config().seq_len;
  std::vector<std::int32_t> tokens = std::move(prompt);
  if (tokens.empty()) tokens.push_back(0);
  Tensor logits;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto T = std::min(static_cast<std::int64_t>(tokens.size()), seq_len);
    logits.resize(DType::kF32, {T, vocab});
    model.logits({tokens.data() + tokens.size() - T, static_cast<std::size_t>(T)}, logits);
    const std::span<const float> last(logits.as<float>() + (T - 1) * vocab, static_cast<std::size_t>(vocab));
    std::int32_t next = pick_token(last, temperature, random_uniform(mix64(seed ^ kSampleStream), static_cast<std::uint64_t>(i)));
    world.broadcast(&next, sizeof next, 0, "train.sample");
    tokens.push_back(next);
  }
  return tokens;
}

std::vector<std::int32_t> encode_prompt(const std::string& prompt, std::int64_t vocab, bool is_bytes) {
  std::vector<std::int32_t> tokens;
  if (is_bytes) {
    for (const char c : prompt) tokens.push_back(static_cast<unsigned char>(c));
  } else {
    std::istringstream words(prompt);
    for (std::string word; words >> word;) {
      char* end = nullptr;
      tokens.push_back(static_cast<std::int32_t>(std::strtol(word.c_str(), &end, 10)));
      if (*end != '\0') tokens.pop_back();  // words of the byte-level default prompt say nothing here
    }
  }
  for (const std::int32_t token : tokens) WB_CHECK(token >= 0 && token < vocab, "prompt token {} is outside the vocabulary of {}", token, vocab);
  return tokens;
}

std::string decode_sample(std::span<const std::int32_t> tokens, bool is_bytes) {
  return is_bytes ? printable_text(tokens) : fmt::format("{}", fmt::join(tokens, " "));
}

}  // namespace waybill
