// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <utility>

#include "token_source.h"
#include "waybill/data.h"
#include "waybill/error.h"
#include "waybill/random.h"

namespace waybill {
namespace {

constexpr std::int64_t kMaxPairVocab = 4096;
constexpr std::uint64_t kBatchStream = 0x62617463;  // separates the data's random stream from the weights' under one seed

double entropy_of(std::span<const std::int64_t> counts) {
  double total = 0, sum = 0;
  for (const std::int64_t n : counts) total += static_cast<double>(n);
  for (const std::int64_t n : counts) {
    if (n > 0) sum -= static_cast<double>(n) / total * std::log(static_cast<double>(n) / total);
  }
  return sum;
}

}  // namespace

struct Dataset::Impl {
  TokenArray tokens;
  std::int64_t size = 0, train_size = 0, vocab = 0, seq_len = 0;

  std::int32_t at(std::int64_t index) const {
    return std::visit([index](const auto& array) { return static_cast<std::int32_t>(array[static_cast<std::size_t>(index)]); }, tokens);
  }
  void copy(std::int64_t begin, std::span<std::int32_t> out) const {
    std::visit([&](const auto& array) { std::copy_n(array.begin() + begin, out.size(), out.begin()); }, tokens);
  }
  void split(const std::string& source, double held_out_fraction);
};

// The held-out part takes at least one sequence; what is left must hold one too.
void Dataset::Impl::split(const std::string& source, double held_out_fraction) {
  WB_CHECK(held_out_fraction > 0 && held_out_fraction < 1, "data.held_out_fraction = {} must be between 0 and 1", held_out_fraction);
  size = std::visit([](const auto& array) { return static_cast<std::int64_t>(array.size()); }, tokens);
  const std::int64_t need = 2 * (seq_len + 1);
  WB_CHECK(size >= need, "text too short: {} holds {} tokens, seq_len = {} needs at least {} (one training and one held-out sequence)", source, size, seq_len,
           need);
  const auto tail = static_cast<std::int64_t>(held_out_fraction * static_cast<double>(size));
  train_size = std::clamp(size - tail, seq_len + 1, size - (seq_len + 1));
}

Dataset::Dataset(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Dataset::Dataset(Dataset&&) noexcept = default;
Dataset& Dataset::operator=(Dataset&&) noexcept = default;
Dataset::~Dataset() = default;

Dataset Dataset::load(const DataConfig& config, std::int64_t vocab, std::int64_t seq_len) {
  WB_CHECK(!config.text.empty() || !config.bin.empty(), "no training data: set data.text (or --text) or data.bin");
  WB_CHECK(config.text.empty() || config.bin.empty(), "data.text = {} and data.bin = {} exclude each other", config.text, config.bin);
  auto impl = std::make_unique<Impl>();
  impl->vocab = vocab;
  impl->seq_len = seq_len;
  impl->tokens = config.text.empty() ? read_bin(config.bin, config.dtype, vocab) : read_text(config.text, vocab);
  impl->split(config.description(), config.held_out_fraction);
  return Dataset(std::move(impl));
}

Dataset Dataset::from_tokens(std::vector<std::int32_t> tokens, std::int64_t vocab, std::int64_t seq_len, double held_out_fraction) {
  auto impl = std::make_unique<Impl>();
  impl->vocab = vocab;
  impl->seq_len = seq_len;
  std::vector<std::uint32_t> array(tokens.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    WB_CHECK(tokens[i] >= 0 && tokens[i] < vocab, "token {} at position {} is outside the vocabulary of {}", tokens[i], i, vocab);
    array[i] = static_cast<std::uint32_t>(tokens[i]);
  }
  impl->tokens = std::move(array);
  impl->split("the token list", held_out_fraction);
  return Dataset(std::move(impl));
}

std::int64_t Dataset::size() const { return impl_->size; }
std::int64_t Dataset::train_size() const { return impl_->train_size; }
std::int64_t Dataset::held_out_size() const { return impl_->size - impl_->train_size; }
std::int32_t Dataset::token(std::int64_t index) const {
  WB_CHECK(index >= 0 && index < impl_->size, "token index {} outside [0, {})", index, impl_->size);
  return impl_->at(index);
}

TextEntropy Dataset::entropy() const {
  TextEntropy result;
  const std::int64_t V = impl_->vocab;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(V), 0);
  for (std::int64_t i = 0; i < impl_->size; ++i) ++counts[static_cast<std::size_t>(impl_->at(i))];
  result.unigram = entropy_of(counts);
  result.pairs_known = V <= kMaxPairVocab;
  if (!result.pairs_known) return result;
  // H(y | x) = H(x, y) - H(x) with x the first token of each pair.
  std::vector<std::int64_t> pairs(static_cast<std::size_t>(V * V), 0);
  for (std::int64_t i = 0; i + 1 < impl_->size; ++i) ++pairs[static_cast<std::size_t>(impl_->at(i) * V + impl_->at(i + 1))];
  --counts[static_cast<std::size_t>(impl_->at(impl_->size - 1))];
  result.bigram = entropy_of(pairs) - entropy_of(counts);
  return result;
}

void Dataset::training_sequence(std::uint64_t seed, std::int64_t step, std::int64_t sequence, std::span<std::int32_t> out) const {
  const auto length = static_cast<std::int64_t>(out.size());
  WB_CHECK(length <= impl_->train_size, "sequence of {} tokens from a training part of {}", length, impl_->train_size);
  const std::uint64_t key = mix64(seed ^ kBatchStream) + static_cast<std::uint64_t>(step);
  const auto positions = static_cast<std::uint64_t>(impl_->train_size - length + 1);
  impl_->copy(static_cast<std::int64_t>(random_u64(key, static_cast<std::uint64_t>(sequence)) % positions), out);
}

std::int64_t Dataset::num_held_out_sequences() const { return (held_out_size() - 1) / impl_->seq_len; }

void Dataset::held_out_sequence(std::int64_t index, std::int64_t count, std::span<std::int32_t> out) const {
  const std::int64_t all = num_held_out_sequences();
  WB_CHECK(count >= 1 && count <= all && index >= 0 && index < count, "held-out sequence {} of {}: the text has {}", index, count, all);
  WB_CHECK(static_cast<std::int64_t>(out.size()) == impl_->seq_len + 1, "a held-out sequence has {} tokens, not {}", impl_->seq_len + 1, out.size());
  impl_->copy(impl_->train_size + index * all / count * impl_->seq_len, out);
}

void fill_micro_batch(const Dataset& data, std::uint64_t seed, std::int64_t step, std::int64_t micro_batch, int rank, int W, const TensorView& tokens) {
  auto* out = tokens.as<std::int32_t>();
  const std::int64_t B = tokens.shape[0];
  const auto length = static_cast<std::size_t>(tokens.shape[1]);
  for (std::int64_t b = 0; b < B; ++b) {
    data.training_sequence(seed, step, (micro_batch * W + rank) * B + b, {out + static_cast<std::size_t>(b) * length, length});
  }
}

}  // namespace waybill
