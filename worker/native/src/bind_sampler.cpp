// Sampler for Python: its arrays, checked and taken apart.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "held_sampler.h"

namespace pagecast {
namespace {

constexpr int64_t kDrawInts = sizeof(DrawWords) / sizeof(int32_t);
constexpr int64_t kEntryInts = sizeof(DrawEntry) / sizeof(int32_t);

void require(bool holds, const char* argument, const std::string& what) {
  if (!holds) throw std::invalid_argument(std::string(argument) + ": " + what);
}

// Ints in rows of `width`, at the border that the values which they hold need.
template <typename T>
const T* to_words(const char* name, const AnyArray& array, int64_t width, int64_t* count) {
  const Array<int32_t> ints = to_array<int32_t>(name, array, "int32");
  require(ints.shape.size() == 2 && ints.shape[1] == width, name,
          "must have two dimensions, the second of " + std::to_string(width));
  require(reinterpret_cast<uintptr_t>(ints.data) % alignof(T) == 0, name,
          "must start at a multiple of 8 bytes");
  *count = ints.shape[0];
  return reinterpret_cast<const T*>(ints.data);
}

template <typename T>
T* to_results(const char* name, const nb::ndarray<>& array, const char* dtype, int64_t num_rows) {
  const Array<T> results = to_array<T>(name, AnyArray(array), dtype);
  require(results.shape.size() == 1 && results.shape[0] >= num_rows, name,
          "must have one dimension, of at least " + std::to_string(num_rows));
  return const_cast<T*>(results.data);
}

SamplerMemory memory_of(const nb::ndarray<>& logits, const AnyArray& draws, const nb::ndarray<>& ids,
                        const nb::ndarray<>& logprobs, int64_t vocab_size) {
  require(logits.dtype() == nb::dtype<float>(), "logits", "must be float32");
  require(logits.device_type() == nb::device::cpu::value, "logits", "must be in host memory");
  require(logits.ndim() == 2, "logits", "must have two dimensions");
  require(logits.shape(1) < 2 || logits.stride(1) == 1, "logits", "a row's floats must lie side by side");
  const auto width = static_cast<int64_t>(logits.shape(1));
  require(vocab_size >= 1 && vocab_size <= width, "vocab_size",
          std::to_string(vocab_size) + ", must be 1 to " + std::to_string(width));
  int64_t num_draws = 0;
  const auto num_rows = static_cast<int64_t>(logits.shape(0));
  const DrawWords* words = to_words<DrawWords>("draws", draws, kDrawInts, &num_draws);
  require(num_draws >= num_rows, "draws", "fewer than rows of logits");
  return {static_cast<float*>(logits.data()),
          logits.stride(0),
          num_rows,
          vocab_size,
          words,
          to_results<int32_t>("ids", ids, "int32", num_rows),
          to_results<float>("logprobs", logprobs, "float32", num_rows)};
}

}  // namespace

HeldSampler::HeldSampler(Team& team, const nb::ndarray<>& logits, const AnyArray& draws,
                         const nb::ndarray<>& ids, const nb::ndarray<>& logprobs, int64_t vocab_size,
                         const std::optional<std::string>& kernel_set)
    : logits_(logits),
      draws_(draws),
      ids_(ids),
      logprobs_(logprobs),
      sampler_(team, memory_of(logits, draws, ids, logprobs, vocab_size),
               kernel_set ? kernel_set->c_str() : nullptr) {}

void HeldSampler::draw(int64_t num_rows, const std::optional<AnyArray>& entries) {
  const Entries table = to_entries(entries);
  const Unlocked unlocked;
  sampler_.draw(num_rows, table.data, table.count);
}

HeldSampler::Entries HeldSampler::to_entries(const std::optional<AnyArray>& entries) {
  if (!entries) return {nullptr, 0};
  int64_t count = 0;
  const DrawEntry* data = to_words<DrawEntry>("entries", *entries, kEntryInts, &count);
  return {data, count};
}

void bind_sampler(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<HeldSampler>(module, "Sampler")
      .def(nb::init<Team&, const nb::ndarray<>&, const AnyArray&, const nb::ndarray<>&, const nb::ndarray<>&,
                    int64_t, const std::optional<std::string>&>(),
           "team"_a, "logits"_a, "draws"_a, "ids"_a, "logprobs"_a, nb::kw_only(), "vocab_size"_a,
           "kernel_set"_a = nb::none(), nb::keep_alive<1, 2>())
      .def("draw", &HeldSampler::draw, "num_rows"_a, "entries"_a = nb::none());
}

}  // namespace pagecast
