// Sampler for Python: holds the arrays that it works on.
#pragma once

#include <optional>

#include "bindings.h"
#include "sampler.h"

namespace pagecast {

class HeldSampler {
 public:
  HeldSampler(Team& team, const nb::ndarray<>& logits, const AnyArray& draws, const nb::ndarray<>& ids,
              const nb::ndarray<>& logprobs, int64_t vocab_size,
              const std::optional<std::string>& kernel_set);

  Sampler& sampler() { return sampler_; }
  void draw(int64_t num_rows, const std::optional<AnyArray>& entries);

  struct Entries {
    const DrawEntry* data;
    int64_t count;
  };
  // Of an int32 array, while that lives. Throws std::invalid_argument where it is none of entries.
  static Entries to_entries(const std::optional<AnyArray>& entries);

 private:
  nb::ndarray<> logits_;
  AnyArray draws_;
  nb::ndarray<> ids_;
  nb::ndarray<> logprobs_;
  Sampler sampler_;
};

}  // namespace pagecast
