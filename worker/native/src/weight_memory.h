// Memory that is read from end to end at every token. Knows no weight.
#pragma once

#include <cstddef>
#include <memory>

namespace pagecast {

// `num_bytes` that are not set, 64-byte aligned, on huge pages where the system gives them: on small ones a
// processor's prefetch stops at each page's end, and a product reads a quarter fewer bytes a second. What is
// below 8 MiB shares a piece of 16 MiB with its neighbours, which returns to the system once all in it is let
// go. Throws std::bad_alloc.
std::shared_ptr<std::byte> allocate_weights(size_t num_bytes);

}  // namespace pagecast
