// SPDX-License-Identifier: Apache-2.0
// Route files: one buffer with the whole file, written and read in one go.
#include "waybill/route_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <span>
#include <system_error>
#include <vector>

#include "route/crc32.h"

namespace waybill {
namespace {

static_assert(std::endian::native == std::endian::little, "route files are little-endian; add byte swaps for this machine");

constexpr char kMagic[8] = {'W', 'B', 'R', 'O', 'U', 'T', 'E', '\n'};
constexpr std::uint32_t kVersion = 1;

struct FileHeader {
  char magic[8];
  std::uint32_t version, id_bytes;
  std::int64_t T, K, E;
  std::uint32_t body_crc, header_crc;
};
static_assert(sizeof(FileHeader) == 48);
constexpr std::size_t kHeaderCrcBytes = 44;

std::string reason(int error) { return std::generic_category().message(error); }

[[noreturn]] void fail_io(const std::string& path, const std::string& what) { WB_FAIL(ErrorCode::kIo, "{}: {}", path, what); }

// A file descriptor that closes itself.
class File {
 public:
  File(const std::string& path, int flags) : fd_(::open(path.c_str(), flags | O_CLOEXEC, 0644)) {}
  ~File() { close(); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  bool is_open() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  int close() {
    const int result = fd_ >= 0 ? ::close(fd_) : 0;
    fd_ = -1;
    return result;
  }

 private:
  int fd_;
};

bool write_all(int fd, const std::byte* data, std::size_t bytes) {
  while (bytes > 0) {
    const ssize_t written = ::write(fd, data, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    data += written;
    bytes -= static_cast<std::size_t>(written);
  }
  return true;
}

std::vector<std::byte> read_all(const std::string& path) {
  const File file(path, O_RDONLY);
  if (!file.is_open()) fail_io(path, "cannot open: " + reason(errno));
  struct stat info {};
  if (::fstat(file.fd(), &info) != 0) fail_io(path, "cannot stat: " + reason(errno));
  if (!S_ISREG(info.st_mode)) fail_io(path, "is not a regular file");
  std::vector<std::byte> content(static_cast<std::size_t>(info.st_size));
  std::size_t done = 0;
  while (done < content.size()) {
    const ssize_t got = ::read(file.fd(), content.data() + done, content.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_io(path, "cannot read: " + reason(errno));
    if (got == 0) fail_io(path, fmt::format("ended after {} of {} bytes", done, content.size()));
    done += static_cast<std::size_t>(got);
  }
  return content;
}

// Bytes of the body, or -1 where the sizes make no sense. 128-bit, so that a corrupt header cannot wrap around.
__int128 body_bytes(const FileHeader& header) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  const bool sane = header.T >= 0 && header.T <= kMax && header.K >= 1 && header.K <= kMax && header.E >= 1 && header.E <= kMax;
  if (!sane || (header.id_bytes != 2 && header.id_bytes != 4)) return -1;
  return static_cast<__int128>(header.T) * header.K * (header.id_bytes + sizeof(float)) + static_cast<__int128>(header.E) * sizeof(std::int32_t);
}

FileHeader check_header(const std::string& path, std::span<const std::byte> file) {
  if (file.size() < sizeof(FileHeader)) fail_io(path, fmt::format("truncated: {} bytes, the header alone has {}", file.size(), sizeof(FileHeader)));
  FileHeader header;
  std::memcpy(&header, file.data(), sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) fail_io(path, "is not a route file (it does not begin with WBROUTE)");
  if (header.version != kVersion) fail_io(path, fmt::format("has version {}, this program reads version {}", header.version, kVersion));
  const std::uint32_t crc = detail::crc32(file.data(), kHeaderCrcBytes);
  if (crc != header.header_crc) fail_io(path, fmt::format("corrupt header: CRC {:08x}, expected {:08x}", crc, header.header_crc));
  const __int128 body = body_bytes(header);
  if (body < 0) fail_io(path, fmt::format("corrupt header: T = {}, K = {}, E = {}, {} bytes an id", header.T, header.K, header.E, header.id_bytes));
  const auto present = static_cast<__int128>(file.size() - sizeof(header));
  if (present != body) {
    fail_io(path, fmt::format("{}: T = {}, K = {}, E = {} need {} bytes, the file has {}", present < body ? "truncated" : "too long", header.T, header.K,
                              header.E, static_cast<std::uint64_t>(body) + sizeof(header), file.size()));
  }
  const std::uint32_t body_crc = detail::crc32(file.data() + sizeof(header), file.size() - sizeof(header));
  if (body_crc != header.body_crc) fail_io(path, fmt::format("corrupt body: CRC {:08x}, expected {:08x}", body_crc, header.body_crc));
  return header;
}

std::vector<std::byte> to_bytes(const RouteView& route) {
  const auto slots = static_cast<std::size_t>(route.T * route.K);
  const std::size_t ids = slots * size_bytes(route.id_dtype), weights = slots * sizeof(float), counts = static_cast<std::size_t>(route.E) * 4;
  std::vector<std::byte> file(sizeof(FileHeader) + ids + weights + counts);
  std::byte* body = file.data() + sizeof(FileHeader);
  if (slots > 0) {
    std::memcpy(body, route.ids, ids);
    std::memcpy(body + ids, route.weights, weights);
  }
  std::memcpy(body + ids + weights, route.counts, counts);
  FileHeader header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kVersion;
  header.id_bytes = static_cast<std::uint32_t>(size_bytes(route.id_dtype));
  header.T = route.T;
  header.K = route.K;
  header.E = route.E;
  header.body_crc = detail::crc32(body, file.size() - sizeof(header));
  std::memcpy(file.data(), &header, sizeof(header));
  header.header_crc = detail::crc32(file.data(), kHeaderCrcBytes);
  std::memcpy(file.data(), &header, sizeof(header));
  return file;
}

}  // namespace

void save_route(const std::string& path, const RouteView& route) {
  if (route.counts == nullptr) {
    const Route counted = Route::copy_of(route);
    save_route(path, counted.view());
    return;
  }
  WB_CHECK(route.device.type == DeviceType::kCpu, "save_route: the route must be in host memory, it is on {}", to_string(route.device));
  const std::vector<std::byte> bytes = to_bytes(route);
  const std::string temporary = fmt::format("{}.tmp.{}", path, ::getpid());
  File file(temporary, O_WRONLY | O_CREAT | O_TRUNC);
  if (!file.is_open()) fail_io(temporary, "cannot create: " + reason(errno));
  const char* step = "write";
  bool good = write_all(file.fd(), bytes.data(), bytes.size());
  if (good) {
    step = "sync";
    good = ::fsync(file.fd()) == 0;
  }
  if (good) {
    step = "close";
    good = file.close() == 0;
  }
  if (good) {
    step = "rename";
    good = ::rename(temporary.c_str(), path.c_str()) == 0;
  }
  if (good) return;
  const int error = errno;
  ::unlink(temporary.c_str());
  fail_io(path, fmt::format("cannot {} the new file: {}", step, reason(error)));
}

Route load_route(const std::string& path, const RouteCheck& check) {
  const std::vector<std::byte> file = read_all(path);
  const FileHeader header = check_header(path, file);
  try {
    Route route(header.T, header.K, header.E, header.id_bytes == 2 ? DType::kI16 : DType::kI32);
    const auto slots = static_cast<std::size_t>(header.T * header.K);
    const std::byte* body = file.data() + sizeof(header);
    if (slots > 0) {
      std::memcpy(route.view().ids, body, slots * header.id_bytes);
      std::memcpy(route.view().weights, body + slots * header.id_bytes, slots * sizeof(float));
    }
    std::memcpy(route.view().counts, body + slots * (header.id_bytes + sizeof(float)), static_cast<std::size_t>(header.E) * 4);
    validate(route, check);
    return route;
  } catch (const Error& error) {
    fail_io(path, error.what());
  }
}

std::string describe(const RouteView& route, std::int64_t max_rows) {
  std::string text = fmt::format("route: T = {}, K = {}, E = {}, ids {}", route.T, route.K, route.E, to_string(route.id_dtype));
  for (std::int64_t t = 0; t < std::min(route.T, max_rows); ++t) {
    text += fmt::format("\ntoken {}:", t);
    for (std::int64_t k = 0; k < route.K; ++k) {
      const std::int32_t id = route.id(t, k);
      text += id == -1 ? " -" : fmt::format(" {}*{:.3f}", id, route.weights[t * route.K + k]);
    }
  }
  if (route.T > max_rows) text += fmt::format("\n... {} more tokens", route.T - std::max<std::int64_t>(max_rows, 0));
  return text;
}

}  // namespace waybill
