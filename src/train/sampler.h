// SPDX-License-Identifier: Apache-2.0
// Text from a model, token by token.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "waybill/language_model.h"

namespace waybill {

// softmax(logits / temperature) sampled at `uniform` in [0, 1); temperature 0: the largest logit, ties to the lower id.
std::int32_t pick_token(std::span<const float> logits, double temperature, double uniform);

// `prompt` and `count` more tokens. The model sees at most seq_len tokens back. Collective; every rank returns the same tokens.
std::vector<std::int32_t> continue_tokens(LanguageModel& model, Fabric& world, std::vector<std::int32_t> prompt, std::int64_t count, double temperature,
                                          std::uint64_t seed);

// Bytes of a prompt; for other vocabularies a list of ids such as "12 7 431".
std::vector<std::int32_t> encode_prompt(const std::string& prompt, std::int64_t vocab, bool is_bytes);
std::string decode_sample(std::span<const std::int32_t> tokens, bool is_bytes);

}  // namespace waybill
