#include "weight_memory.h"

#include <cstdlib>
#include <mutex>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace pagecast {
namespace {

constexpr size_t kCacheLine = 64;
constexpr size_t kHugePage = size_t{2} << 20;
// What small weights share; untouched pages of it take no memory.
constexpr size_t kChunk = 8 * kHugePage;

size_t round_up_to(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

std::shared_ptr<std::byte> huge_pages(size_t num_bytes) {
  const size_t padded = round_up_to(num_bytes, kHugePage);
  void* memory = std::aligned_alloc(kHugePage, padded);
  if (memory == nullptr) throw std::bad_alloc();
#ifdef __linux__
  // Advice alone: where the kernel declines, small pages serve as well, only slower.
  madvise(memory, padded, MADV_HUGEPAGE);
#endif
  return {static_cast<std::byte*>(memory), [](std::byte* data) { std::free(data); }};
}

// Hands out a chunk from front to back, then begins another.
class Chunks {
 public:
  std::shared_ptr<std::byte> allocate(size_t num_bytes) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<std::byte> chunk = chunk_.lock();
    if (chunk == nullptr || used_ + num_bytes > kChunk) {
      chunk = huge_pages(kChunk);
      chunk_ = chunk;
      used_ = 0;
    }
    std::byte* data = chunk.get() + used_;
    used_ += num_bytes;
    return {std::move(chunk), data};
  }

 private:
  std::mutex mutex_;
  std::weak_ptr<std::byte> chunk_;  // lives as long as a weight in it
  size_t used_ = 0;
};

}  // namespace

std::shared_ptr<std::byte> allocate_weights(size_t num_bytes) {
  static Chunks chunks;
  const size_t padded = round_up_to(num_bytes, kCacheLine);
  return padded < kChunk / 2 ? chunks.allocate(padded) : huge_pages(padded);
}

}  // namespace pagecast
