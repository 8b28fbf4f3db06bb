// SPDX-License-Identifier: Apache-2.0
// Every rule a model's configuration must keep, checked before anything is allocated or communicated.
#include <cmath>

#include "model/parameters.h"
#include "waybill/language_model.h"

namespace waybill {

void validate(const ModelConfig& c, int W) {
  WB_CHECK(W >= 1, "{}: {} ranks", c.name, W);
  WB_CHECK(c.vocab >= 1 && c.H >= 1 && c.seq_len >= 1, "{}: vocab {}, H {} and seq_len {} must be positive", c.name, c.vocab, c.H, c.seq_len);
  WB_CHECK(c.vocab <= std::int64_t{1} << 31, "{}: vocab {} does not fit int32 tokens", c.name, c.vocab);
  WB_CHECK(c.num_heads >= 1 && c.num_kv_heads >= 1 && c.num_heads % c.num_kv_heads == 0, "{}: num_heads {} must be a multiple of num_kv_heads {}", c.name,
           c.num_heads, c.num_kv_heads);
  WB_CHECK(c.head_dim >= 2 && c.head_dim % 2 == 0, "{}: head_dim {} must be even (rotary pairs)", c.name, c.head_dim);
  WB_CHECK(c.max_sequences >= 0, "{}: max_sequences {} must not be negative", c.name, c.max_sequences);
  WB_CHECK(c.rope_theta > 0 && std::isfinite(c.rope_theta), "{}: rope_theta {} must be positive", c.name, c.rope_theta);
  WB_CHECK(c.norm_epsilon >= 0 && c.init_std >= 0 && std::isfinite(c.norm_epsilon) && std::isfinite(c.init_std),
           "{}: norm_epsilon {} and init_std {} must not be negative", c.name, c.norm_epsilon, c.init_std);
  WB_CHECK(!c.layers.empty(), "{}: no layers", c.name);
  for (std::size_t i = 0; i < c.layers.size(); ++i) {
    const LayerConfig& layer = c.layers[i];
    if (!layer.is_moe) {
      WB_CHECK(layer.dense_F >= 1, "{}: layer {} is dense and needs dense_F, got {}", c.name, i, layer.dense_F);
      continue;
    }
    WB_CHECK(layer.P >= 1 && W % layer.P == 0, "{}: layer {} has P = {} expert-parallel ranks, which does not divide the world of {} ranks", c.name, i, layer.P,
             W);
    if (layer.moe.expert_tensor_parallel != 1)
      WB_FAIL(ErrorCode::kUnsupported, "{}: layer {}: a language model holds whole experts; expert_tensor_parallel = {} must be 1", c.name, i,
              layer.moe.expert_tensor_parallel);
    try {
      validate(model::moe_config(c, layer), layer.P);
    } catch (const Error& error) {
      WB_FAIL(error.code(), "{}: layer {}: {}", c.name, i, error.what());
    }
  }
}

}  // namespace waybill
