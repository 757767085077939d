// A function that leaves no copy of itself behind. A header's inline function that is not inlined is emitted
// in every translation unit and the linker keeps one: it could be the one compiled with AVX-512, for
// everybody.
#pragma once

#define PAGECAST_INLINE [[gnu::always_inline]] static inline
#define PAGECAST_MEMBER [[gnu::always_inline]] inline
