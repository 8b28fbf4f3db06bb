// SPDX-License-Identifier: Apache-2.0
#include "arguments.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <vector>

#include "train/config_schema.h"
#include "waybill/error.h"

namespace waybill::cli {

CLI::Validator at_least(std::int64_t least) {
  const auto refusal = [least](const std::string& text) {
    std::int64_t value = 0;
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, value);
    const bool good = error == std::errc() && rest == end && value >= least;
    return good ? std::string() : fmt::format("{} must be an integer of at least {}", text, least);
  };
  return CLI::Validator(refusal, fmt::format(">={}", least));
}

std::string unknown_command(const CLI::App& app, int argc, const char* const* argv) {
  const CLI::App* level = &app;
  std::string path;
  for (int i = 1; i < argc && level->get_require_subcommand_min() > 0; ++i) {
    const std::string word = argv[i];
    if (word.empty() || word[0] == '-') return "";
    std::vector<std::string> names;
    const CLI::App* next = nullptr;
    for (const CLI::App* command : level->get_subcommands([](const CLI::App*) { return true; })) {
      names.push_back(command->get_name());
      if (command->get_name() == word) next = command;
    }
    if (next == nullptr) {
      const std::string near = nearest(word, names);
      return fmt::format("unknown command {}{}{}", path, word, near.empty() ? "" : fmt::format("; did you mean {}{}?", path, near));
    }
    path += word + " ";
    level = next;
  }
  return "";
}

void check_writable(const std::string& path, const std::string& option) {
  namespace fs = std::filesystem;
  if (path.empty() || path == "-") return;
  const auto refuse = [&](const std::string& why) { WB_FAIL(ErrorCode::kIo, "{} {} cannot be written: {}", option, path, why); };
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (fs::is_directory(status)) refuse("it is a folder");
  if (fs::exists(status)) {
    if (access(path.c_str(), W_OK) != 0) refuse(std::strerror(errno));
    return;
  }
  const std::string parent = fs::path(path).has_parent_path() ? fs::path(path).parent_path().string() : ".";
  if (!fs::is_directory(parent, error)) refuse(fmt::format("{} is not a folder", parent));
  if (access(parent.c_str(), W_OK) != 0) refuse(std::strerror(errno));
}

}  // namespace waybill::cli
