// How the threads of a run divide a launch's units. Knows neither what a unit is nor who runs it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace pagecast {

// A thread takes many units at first and few at the end, the many in multiples of this.
inline constexpr int64_t kManyUnits = 8;

// Half of what is left, so that little is under way when the launch ends, and a multiple of `at_once`, the
// units that a kernel works on together, as long as there are as many.
constexpr int64_t next_share(int64_t left, int64_t at_once = 1) {
  const int64_t half = (left + 1) / 2;
  if (half > kManyUnits) return half - half % kManyUnits;
  const int64_t share = (half + at_once - 1) / at_once * at_once;
  return share < left ? share : left;
}

struct Units {
  int64_t first;
  int64_t last;
  bool empty() const { return first >= last; }
};

// Where thread `thread`'s own units of [0, num_units) begin, at a multiple of `at_once`; they end where the
// next thread's begin.
constexpr int64_t own_begin(int64_t num_units, int num_threads, int thread, int64_t at_once = 1) {
  const int64_t begin = num_units * thread / num_threads;
  return thread == num_threads ? num_units : begin - begin % at_once;
}

// Units that nobody has taken yet, fewer than 2^32: whom they belong to takes from the front, whoever has no
// more from the back. `Word` is std::atomic<uint64_t>.
template <typename Word>
class Range {
 public:
  // Only while nobody takes.
  void set(Units units) {
    ends_.store(static_cast<uint64_t>(units.first) << 32 | static_cast<uint64_t>(units.last),
                std::memory_order_relaxed);
  }
  Units take_front(int64_t at_once = 1) {
    return take([at_once](Units left) {
      return Units{left.first, left.first + next_share(left.last - left.first, at_once)};
    });
  }
  Units take_back(int64_t at_once = 1) {
    return take([at_once](Units left) {
      return Units{left.last - next_share(left.last - left.first, at_once), left.last};
    });
  }

 private:
  template <typename Choose>
  Units take(Choose&& choose) {
    uint64_t seen = ends_.load(std::memory_order_relaxed);
    while (true) {
      const Units left{static_cast<int64_t>(seen >> 32), static_cast<int64_t>(seen & 0xffffffffu)};
      if (left.empty()) return {0, 0};
      const Units taken = choose(left);
      const Units rest =
          taken.first == left.first ? Units{taken.last, left.last} : Units{left.first, taken.first};
      const uint64_t ends = static_cast<uint64_t>(rest.first) << 32 | static_cast<uint64_t>(rest.last);
      if (ends_.compare_exchange_weak(seen, ends, std::memory_order_relaxed)) return taken;
    }
  }

  Word ends_{0};
};

// The ranges of a team, for two launches: while one is at work its threads lay out the next. Each thread has
// its own units in one piece, so that it reads them as a stream and knows beforehand where it begins.
class Shares {
 public:
  explicit Shares(int num_threads)
      : num_threads_(num_threads), places_(std::make_unique<Place[]>(static_cast<size_t>(num_threads))) {}

  // Thread `thread`'s own units of the launch of `turn` (0 or 1). Called for every thread, by itself or
  // before there are threads, before a meeting that comes before the launch.
  void lay_out(int turn, int64_t num_units, int thread, int64_t at_once = 1) {
    places_[static_cast<size_t>(thread)].of[turn].set(
        {own_begin(num_units, num_threads_, thread, at_once),
         own_begin(num_units, num_threads_, thread + 1, at_once)});
  }

  // Calls do_units(first, last) for this thread's shares of the launch of `turn`: its own, then what others
  // have not come to. All threads together do each unit once, whoever comes when. `at_once` as it was laid
  // out.
  template <typename DoUnits>
  void share(int turn, int thread, DoUnits&& do_units, int64_t at_once = 1) {
    auto& own = places_[static_cast<size_t>(thread)].of[turn];
    for (Units units = own.take_front(at_once); !units.empty(); units = own.take_front(at_once))
      do_units(units.first, units.last);
    for (int step = 1; step < num_threads_; ++step) {
      auto& other = places_[static_cast<size_t>((thread + step) % num_threads_)].of[turn];
      for (Units units = other.take_back(at_once); !units.empty(); units = other.take_back(at_once))
        do_units(units.first, units.last);
    }
  }

 private:
  // A cache line each: others look there only once they have nothing else to do.
  struct alignas(64) Place {
    Range<std::atomic<uint64_t>> of[2];
  };

  const int num_threads_;
  std::unique_ptr<Place[]> places_;
};

}  // namespace pagecast
