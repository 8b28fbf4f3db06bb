// SPDX-License-Identifier: Apache-2.0
#include "waybill/route_io.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "route/crc32.h"
#include "route/random_routes.h"

namespace waybill {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class RouteFiles : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / fmt::format("waybill_route_{}_{}", ::getpid(), testing::UnitTest::GetInstance()->random_seed());
    std::filesystem::create_directories(folder_);
    path_ = (folder_ / "batch.route").string();
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string bytes() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void write(const std::string& content) const { std::ofstream(path_, std::ios::binary) << content; }
  std::string refusal() const {
    try {
      load_route(path_);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kIo);
      EXPECT_THAT(error.what(), HasSubstr(path_));
      return error.what();
    }
    return "not refused";
  }
  std::size_t num_files() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder_), std::filesystem::directory_iterator()));
  }

  std::filesystem::path folder_;
  std::string path_;
};

TEST(Crc32, KnownValues) {
  EXPECT_EQ(detail::crc32("123456789", 9), 0xCBF43926u);
  EXPECT_EQ(detail::crc32("", 0), 0u);
  EXPECT_EQ(detail::crc32("6789", 4, detail::crc32("12345", 5)), 0xCBF43926u);
}

TEST_F(RouteFiles, RoundTripsBothIdTypesAndEmptyBatches) {
  for (const std::int64_t E : {std::int64_t{60}, std::int64_t{33000}}) {
    for (const std::int64_t T : {0, 1, 37}) {
      const Route saved = testing_support::random_route(T, 4, E, {.seed = 9, .drop = 0.3});
      save_route(path_, saved);
      const Route loaded = load_route(path_);
      ASSERT_EQ(loaded.T(), T);
      ASSERT_EQ(loaded.E(), E);
      ASSERT_EQ(loaded.view().id_dtype, saved.view().id_dtype);
      for (std::int64_t i = 0; i < T * 4; ++i) {
        ASSERT_EQ(loaded.view().id(i / 4, i % 4), saved.view().id(i / 4, i % 4));
        ASSERT_EQ(loaded.view().weights[i], saved.view().weights[i]);
      }
      EXPECT_EQ(std::memcmp(loaded.view().counts, saved.view().counts, static_cast<std::size_t>(E) * 4), 0);
      EXPECT_EQ(num_files(), 1u);
    }
  }
}

TEST_F(RouteFiles, TheLayoutIsTheDocumentedOne) {
  save_route(path_, Route::from_ids(1, 2, 3, std::vector<std::int32_t>{2, -1}, std::vector<float>{0.5f, 0.0f}));
  const std::string file = bytes();
  ASSERT_EQ(file.size(), 48u + 4 + 8 + 12);
  EXPECT_EQ(file.substr(0, 8), "WBROUTE\n");
  EXPECT_EQ(file.substr(8, 32), std::string("\1\0\0\0\2\0\0\0\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0\3\0\0\0\0\0\0\0", 32));
  EXPECT_EQ(file.substr(48, 4), std::string("\2\0\xff\xff", 4));
  EXPECT_EQ(file.substr(52, 8), std::string("\0\0\0\x3f\0\0\0\0", 8));
  EXPECT_EQ(file.substr(60, 12), std::string("\0\0\0\0\0\0\0\0\1\0\0\0", 12));
}

TEST_F(RouteFiles, EveryFlippedByteAndEveryTruncationIsRefused) {
  save_route(path_, testing_support::random_route(5, 2, 6, {.seed = 4}));
  const std::string good = bytes();
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x41);
    write(bad);
    EXPECT_NE(refusal(), "not refused") << "byte " << i;
    write(good.substr(0, i));
    EXPECT_NE(refusal(), "not refused") << "truncated to " << i;
  }
  write(good + "x");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("too long"), HasSubstr(fmt::format("the file has {}", good.size() + 1))));
  write(good);
  EXPECT_NO_THROW(load_route(path_));
}

TEST_F(RouteFiles, TheMessageSaysWhatIsWrong) {
  EXPECT_THAT(refusal(), HasSubstr("No such file"));
  write("");
  EXPECT_THAT(refusal(), HasSubstr("truncated: 0 bytes"));
  write(std::string(100, 'x'));
  EXPECT_THAT(refusal(), HasSubstr("is not a route file"));
  save_route(path_, testing_support::random_route(5, 2, 6, {.seed = 4}));
  const std::string good = bytes();
  std::string other = good;
  other[8] = 2;
  write(other);
  EXPECT_THAT(refusal(), HasSubstr("has version 2, this program reads version 1"));
  write(good.substr(0, 60));
  EXPECT_THAT(refusal(), AllOf(HasSubstr("truncated"), HasSubstr("T = 5"), HasSubstr("the file has 60")));
  other = good;
  other[50] = 'z';
  write(other);
  EXPECT_THAT(refusal(), HasSubstr("corrupt body"));
  path_ = folder_.string();
  EXPECT_THAT(refusal(), HasSubstr("not a regular file"));
}

// A file whose checksums are right but whose routes are not.
TEST_F(RouteFiles, ContentIsValidated) {
  Route route = Route::from_ids(1, 1, 4, std::vector<std::int32_t>{1});
  route.view().set_id(0, 0, 9);
  route.recount();
  save_route(path_, route);
  EXPECT_THAT(refusal(), HasSubstr("route row 0, slot 0: id 9"));
  EXPECT_NO_THROW(load_route(path_, RouteCheck{.allow_out_of_range = true}));
}

TEST_F(RouteFiles, AFailedSaveLeavesTheOldFileAndNothingElse) {
  save_route(path_, Route(1, 1, 2));
  const std::string before = bytes();
  const std::string missing = (folder_ / "none" / "x.route").string();
  EXPECT_THROW(save_route(missing, Route(1, 1, 2)), Error);
  std::filesystem::create_directory(folder_ / "is_a_folder");
  EXPECT_THROW(save_route((folder_ / "is_a_folder").string(), Route(1, 1, 2)), Error);
  EXPECT_EQ(bytes(), before);
  EXPECT_EQ(num_files(), 2u);  // the route and the folder: no temporary file
}

// A sparse header claiming terabytes must be refused by size, not by an allocation.
TEST_F(RouteFiles, HugeSizesInTheHeaderAllocateNothing) {
  save_route(path_, Route(1, 1, 2));
  std::string file = bytes();
  const std::int64_t huge = 2147483647;
  std::memcpy(file.data() + 16, &huge, 8);
  const std::uint32_t crc = detail::crc32(file.data(), 44);
  std::memcpy(file.data() + 44, &crc, 4);
  write(file);
  AllocationTrace trace;
  EXPECT_THAT(refusal(), HasSubstr("truncated: T = 2147483647"));
  EXPECT_EQ(trace.count(), 0u);
}

TEST(RouteText, PrintsRowsAndHowManyAreLeft) {
  const Route route = Route::from_ids(3, 2, 8, std::vector<std::int32_t>{7, 2, 1, -1, 0, 3}, std::vector<float>{0.75f, 0.25f, 1.0f, 0.0f, 0.5f, 0.5f});
  EXPECT_EQ(describe(route, 2), "route: T = 3, K = 2, E = 8, ids i16\ntoken 0: 7*0.750 2*0.250\ntoken 1: 1*1.000 -\n... 1 more tokens");
}

}  // namespace
}  // namespace waybill
