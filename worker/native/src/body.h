// What a launch does, as one call and the memory that it closes over. Knows neither launches nor kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

namespace pagecast {

// What a launch works on: how many rows are live, which of its units, on which thread.
struct Share {
  int64_t num_rows;
  int64_t first;
  int64_t last;
  int thread;
};

// A function of a Share whose own bytes can be asked for before the call, which std::function's can't: a
// launch finds caches that the one before has swept.
class Body {
 public:
  Body() = default;
  template <typename Work>
    requires(!std::is_same_v<std::decay_t<Work>, Body>)
  Body(Work&& work)  // NOLINT(google-explicit-constructor): a lambda is passed as what it does
      : call_([](const void* state, const Share& share) {
          (*static_cast<const std::decay_t<Work>*>(state))(share);
        }),
        state_(std::make_shared<std::decay_t<Work>>(std::forward<Work>(work))),
        state_bytes_(sizeof(std::decay_t<Work>)) {}

  void operator()(const Share& share) const { call_(state_.get(), share); }

  // To be called from elsewhere: valid as long as this or a copy of it.
  struct Reference {
    void (*call)(const void* state, const Share& share);
    const void* state;
    uint32_t state_bytes;

    void operator()(const Share& share) const { call(state, share); }
    // Its own bytes; not what it points to.
    void fetch() const {
      const auto* first = static_cast<const std::byte*>(state);
      for (uint32_t offset = 0; offset < state_bytes; offset += 64) __builtin_prefetch(first + offset);
      if (state_bytes != 0) __builtin_prefetch(first + state_bytes - 1);
    }
  };
  Reference reference() const { return {call_, state_.get(), state_bytes_}; }

 private:
  void (*call_)(const void* state, const Share& share) = nullptr;
  std::shared_ptr<const void> state_;
  uint32_t state_bytes_ = 0;
};

}  // namespace pagecast
