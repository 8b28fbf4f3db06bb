// SPDX-License-Identifier: Apache-2.0
// Training text as tokens: bytes of text files, or pre-tokenised uint16/uint32 files; held-out tail, deterministic batches, entropies.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "waybill/tensor.h"

namespace waybill {

struct DataConfig {
  std::string text;                 // a file, or a folder whose regular files are joined in path order; tokens are bytes (vocab 256)
  std::string bin;                  // a .bin file of little-endian tokens; BIN.json beside it may give {"dtype": "uint16", "vocab": n}
  std::string dtype;                // of bin: "uint16" or "uint32"; empty = the sidecar's. Both given must agree
  double held_out_fraction = 0.05;  // this tail of the tokens is never trained on
  std::string description() const { return text.empty() ? bin : text; }
};

// Entropies in nats of the empirical distribution of all tokens (training and held-out part together):
//   unigram = -sum_x p(x) ln p(x);  bigram = -sum_{x,y} p(x, y) ln p(y | x), over adjacent pairs: what is left to guess of a token
//   when the one before it is known. pairs_known is false (and bigram 0) where the vocabulary is above 4,096 tokens.
struct TextEntropy {
  double unigram = 0, bigram = 0;
  bool pairs_known = true;
};

// All tokens of a run, read once; immutable, so that ranks of one process share it.
class WB_API Dataset {
 public:
  // Reads and checks everything: a missing or empty file, a size that is not a multiple of the token size, an unknown or
  // contradicting dtype, a token >= vocab (with position and value), and a text too short for one training and one held-out
  // sequence of seq_len + 1 tokens are refused with the values.
  static Dataset load(const DataConfig& config, std::int64_t vocab, std::int64_t seq_len);
  // From memory (tests).
  static Dataset from_tokens(std::vector<std::int32_t> tokens, std::int64_t vocab, std::int64_t seq_len, double held_out_fraction);

  Dataset(Dataset&&) noexcept;
  Dataset& operator=(Dataset&&) noexcept;
  ~Dataset();

  std::int64_t size() const;           // tokens
  std::int64_t train_size() const;     // tokens [0, train_size) are trained on
  std::int64_t held_out_size() const;  // tokens [train_size, size)
  std::int32_t token(std::int64_t index) const;
  TextEntropy entropy() const;

  // Row `sequence` of the global batch of `step`: seq_len + 1 tokens starting at a position that is a pure function of (seed, step,
  // sequence), uniform over the training part. Independent of ranks, so every (P, D) and micro-batch count sees the same batch.
  void training_sequence(std::uint64_t seed, std::int64_t step, std::int64_t sequence, std::span<std::int32_t> out) const;
  // Non-overlapping held-out windows (each target is scored once); `count` of them evenly spread when it is less than all.
  std::int64_t num_held_out_sequences() const;
  void held_out_sequence(std::int64_t index, std::int64_t count, std::span<std::int32_t> out) const;

 private:
  struct Impl;
  explicit Dataset(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Writes tokens [B, seq_len + 1] int32 of one rank's micro-batch. The global batch's rows are dealt micro-batch by micro-batch, then
// rank by rank: row (m * W + rank) * B + b.
WB_API void fill_micro_batch(const Dataset& data, std::uint64_t seed, std::int64_t step, std::int64_t micro_batch, int rank, int W, const TensorView& tokens);

// Printable form of byte tokens, for samples: control bytes other than newline and tab, and bytes that are not valid UTF-8, become '?'.
WB_API std::string printable_text(std::span<const std::int32_t> tokens);

}  // namespace waybill
