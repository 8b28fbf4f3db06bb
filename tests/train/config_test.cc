// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <filesystem>

#include "error_text.h"
#include "temp_folder.h"
#include "train/config_schema.h"
#include "waybill/train_config.h"

namespace waybill {
namespace {

using test::error_text;
using testing::HasSubstr;

constexpr const char* kSmall = R"(
name = "small"
[model]
H = 64
num_layers = 3
num_dense_layers = 1
dense_F = 128
[moe]
E = 8
K = 2
F = 32
[router]
score = "sigmoid"
[[layers]]
index = [2]
P = 2
moe.E = 16
router.scaling_factor = 2.5
[parallel]
P = 4
)";

RunConfig parse(const std::string& text, std::vector<std::string> overrides = {}) { return parse_run_config(text, "test.toml", overrides); }

TEST(ConfigTest, LayersTakeDefaultsAndTheirOwnChanges) {
  const RunConfig config = parse(kSmall);
  ASSERT_EQ(config.model.layers.size(), 3u);
  EXPECT_FALSE(config.model.layers[0].is_moe);
  EXPECT_EQ(config.model.layers[0].dense_F, 128);
  EXPECT_TRUE(config.model.layers[1].is_moe);
  EXPECT_EQ(config.model.layers[1].P, 4);
  EXPECT_EQ(config.model.layers[1].moe.router.E, 8);
  EXPECT_EQ(config.model.layers[1].moe.router.score, ScoreFunction::kSigmoid);
  EXPECT_EQ(config.model.layers[2].P, 2);
  EXPECT_EQ(config.model.layers[2].moe.E, 16);
  EXPECT_EQ(config.model.layers[2].moe.router.E, 16);
  EXPECT_FLOAT_EQ(config.model.layers[2].moe.router.scaling_factor, 2.5f);
}

TEST(ConfigTest, UnknownKeyNamesFileLineAndNearest) {
  EXPECT_EQ(error_text([] { parse("[moe]\nE = 8\nexpert_bais = true\n"); }), "test.toml:3: unknown key moe.expert_bais; did you mean moe.expert_bias?");
  EXPECT_EQ(error_text([] { parse("[rooter]\nscore = \"sigmoid\"\n"); }), "test.toml:1: unknown section [rooter]; did you mean [router]?");
  EXPECT_EQ(error_text([] { parse("[[layers]]\nindex = 0\nmoe.Ee = 4\n"); }), "test.toml:3: unknown key moe.Ee; did you mean moe.E?");
  EXPECT_EQ(error_text([] { parse("", {"train.step=5"}); }), "--set train.step=5: unknown key train.step; did you mean train.steps?");
}

TEST(ConfigTest, WrongValueNamesKeyValueAndWhatIsAllowed) {
  EXPECT_EQ(error_text([] { parse("[train]\nsteps = -5\n"); }), "test.toml:2: train.steps = -5 must be an integer from 1 to 1000000000");
  EXPECT_EQ(error_text([] { parse("[train]\nsteps = 1.5\n"); }), "test.toml:2: train.steps = 1.5 must be an integer from 1 to 1000000000");
  EXPECT_EQ(error_text([] { parse("[train]\nsteps = \"10\"\n"); }), "test.toml:2: train.steps = \"10\" must be an integer from 1 to 1000000000");
  EXPECT_EQ(error_text([] { parse("[router]\nscore = \"softmx\"\n"); }),
            "test.toml:2: router.score = \"softmx\" must be one of \"softmax\", \"softmax_selected\", \"sigmoid\", \"sqrt_softplus\"");
  EXPECT_EQ(error_text([] { parse("[train]\nlearning_rate = nan\n"); }), "test.toml:2: train.learning_rate = nan must be a number from 0 to 10");
  EXPECT_EQ(error_text([] { parse("[model]\nqk_norm = 1\n"); }), "test.toml:2: model.qk_norm = 1 must be true or false");
}

TEST(ConfigTest, SyntaxErrorNamesLineAndColumn) {
  EXPECT_THAT(error_text([] { parse("[train]\nsteps = = 3\n"); }), HasSubstr("test.toml:2:9:"));
}

TEST(ConfigTest, OverridesAreTypeChecked) {
  const RunConfig config = parse(kSmall, {"train.steps=7", "train.learning_rate=1", "router.score=softmax", "name=12", "data.text=true"});
  EXPECT_EQ(config.train.steps, 7);
  EXPECT_EQ(config.train.learning_rate, 1.0);
  EXPECT_EQ(config.model.layers[1].moe.router.score, ScoreFunction::kSoftmax);
  EXPECT_EQ(config.name, "12");
  EXPECT_EQ(config.data.text, "true");
  EXPECT_THAT(error_text([] { parse(kSmall, {"train.steps=many"}); }), HasSubstr("--set train.steps=many: train.steps = \"many\" must be an integer"));
  EXPECT_THAT(error_text([] { parse(kSmall, {"train.steps"}); }), HasSubstr("must be key=value"));
}

TEST(ConfigTest, ResolvedConfigReadsBackEqual) {
  RunConfig config = parse(kSmall, {"train.sample_prompt=\"say \\\"hi\\\"\\n\\\\\"", "moe.aux_coefficient=0.1", "model.norm_epsilon=1e-6"});
  EXPECT_EQ(config.train.sample_prompt, "say \"hi\"\n\\");
  const std::string text = to_toml(config);
  const RunConfig again = parse(text);
  EXPECT_EQ(to_toml(again), text);
  EXPECT_EQ(again.train.sample_prompt, config.train.sample_prompt);
  EXPECT_EQ(again.layer.moe.aux_coefficient, 0.1f);
  EXPECT_EQ(again.model.layers[2].moe.E, 16);
  EXPECT_THAT(text, HasSubstr("aux_coefficient = 0.1\n"));
}

TEST(ConfigTest, RealsSurviveTheFileBitForBit) {
  rc::check("to_toml keeps reals", [] {
    const auto bits = *rc::gen::inRange<std::uint32_t>(0x2f800000u, 0x40000000u);  // about 2e-10 .. 2
    float value;
    std::memcpy(&value, &bits, 4);
    RunConfig config = parse(kSmall);
    config.layer.moe.z_coefficient = value;
    config.train.learning_rate = static_cast<double>(value) / 3;
    const RunConfig again = parse(to_toml(config));
    RC_ASSERT(again.layer.moe.z_coefficient == value);
    RC_ASSERT(again.train.learning_rate == config.train.learning_rate);
  });
}

TEST(ConfigTest, RulesAcrossKeysNameTheValues) {
  EXPECT_EQ(error_text([] { validate(parse(kSmall, {"moe.K=9"})); }), "small: layer 1: moe.K = 9 exceeds moe.E = 8");
  EXPECT_EQ(error_text([] { validate(parse(kSmall, {"moe.E=6"})); }), "small: layer 1: moe.E = 6 is not divisible by P = 4 ranks");
  EXPECT_EQ(error_text([] { validate(parse(kSmall, {"train.global_batch=30"})); }),
            "small: train.global_batch = 30 is not divisible by micro_batches * W = 1 * 4");
  EXPECT_EQ(error_text([] {
              validate(parse(kSmall, {"model.attention=mla", "model.output_gate=true", "model.mtp_layers=2", "model.shared_gate=true"}));
            }),
            "small: this engine does not train model.attention = \"mla\", model.output_gate = true, model.mtp_layers = 2, model.shared_gate = true; "
            "`waybill inspect model` gives the model's sizes");
  EXPECT_THAT(error_text([] { validate(parse(kSmall, {"model.full_attention_interval=4"})); }), HasSubstr("does not train model.full_attention_interval = 4"));
  EXPECT_THAT(error_text([] { validate(parse(kSmall, {"model.linear_key_dim=8"})); }), HasSubstr("linear_key_dim = 8, linear_value_dim = 0 need model.full"));
  EXPECT_THAT(error_text([] { validate(parse(kSmall, {"model.kv_rank=8"})); }), HasSubstr("kv_rank = 8, nope_dim = 0, rope_dim = 0, v_dim = 0 need model.att"));
  EXPECT_THAT(error_text([] { parse("[[layers]]\nindex = 9\nkind = \"dense\"\n"); }), HasSubstr("layers.index = 9 is outside the 2 layers"));
}

TEST(ConfigTest, ModelPartIgnoresWhatACheckpointDoesNotDependOn) {
  const std::string base = model_toml(parse(kSmall));
  EXPECT_EQ(model_toml(parse(kSmall, {"parallel.P=2", "train.steps=3", "exchange.mode=captured"})), base);
  EXPECT_NE(model_toml(parse(kSmall, {"model.H=32"})), base);
  EXPECT_NE(model_toml(parse(kSmall, {"router.score=softmax"})), base);
}

TEST(ConfigTest, EveryKeyHasHelpAndADefaultThatIsAllowed) {
  const RunConfig defaults;
  for (const RunKey& key : run_keys()) {
    EXPECT_FALSE(key.help.empty()) << key.name;
    EXPECT_NO_THROW(check_value("default", key.name, key.type, key.min, key.max, key.choices, key.get(defaults))) << key.name;
  }
  EXPECT_EQ(config_keys().size(), run_keys().size());
}

// Every shipped file parses; the ones that can be trained here validate.
TEST(ConfigTest, ShippedConfigsAreValid) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(WAYBILL_CONFIG_DIR)) {
    if (entry.path().extension() != ".toml") continue;
    SCOPED_TRACE(entry.path().string());
    RunConfig config;
    ASSERT_EQ(error_text([&] { config = load_run_config(entry.path().string()); }), "no error");
    EXPECT_EQ(config.name, entry.path().stem().string());
    EXPECT_EQ(error_text([&] { validate(architecture_of(config)); }), "no error");
    const std::string error = error_text([&] { validate(config); });
    if (counted_only_settings(config).empty())
      EXPECT_EQ(error, "no error");
    else
      EXPECT_THAT(error, HasSubstr("this engine does not train"));
    ++count;
  }
  EXPECT_GE(count, 13);
}

}  // namespace
}  // namespace waybill
