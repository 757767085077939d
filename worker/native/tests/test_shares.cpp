// The threads of a launch do each of its units once, however they come to it.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "../src/shares.h"
#include "../src/team.h"
#include "check.h"

namespace {

using pagecast::Team;

struct Launch {
  Team* team;
  pagecast::Shares* shares;
  int64_t num_units;
  int turn;
  bool is_lame;                         // thread 0 comes last, so that others do its units
  std::vector<std::atomic<int>> times;  // by unit
  std::atomic<int> num_foreign{0};      // units done by another thread than their own
};

void do_launch(void* context, int thread) {
  Launch& launch = *static_cast<Launch*>(context);
  const int num_threads = launch.team->size();
  launch.shares->lay_out(launch.turn, launch.num_units, thread);
  launch.team->meet([] {});
  if (launch.is_lame && thread == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  launch.shares->share(launch.turn, thread, [&](int64_t first, int64_t last) {
    for (int64_t unit = first; unit < last; ++unit) {
      launch.times[static_cast<size_t>(unit)].fetch_add(1, std::memory_order_relaxed);
      const bool is_own = unit >= pagecast::own_begin(launch.num_units, num_threads, thread) &&
                          unit < pagecast::own_begin(launch.num_units, num_threads, thread + 1);
      if (!is_own) launch.num_foreign.fetch_add(1, std::memory_order_relaxed);
    }
  });
  launch.team->meet([] {});
}

int check_launch(Team& team, pagecast::Shares& shares, int64_t num_units, bool is_lame = false) {
  Launch launch{&team,     &shares,
                num_units, static_cast<int>(num_units % 2),
                is_lame,   std::vector<std::atomic<int>>(static_cast<size_t>(num_units) + 1),
                0};
  {
    Team::Lease lease(team);
    lease.run(do_launch, &launch);
  }
  for (int64_t unit = 0; unit < num_units; ++unit) {
    const int times = launch.times[static_cast<size_t>(unit)].load();
    if (times == 1) continue;
    CHECK(false, "unit %d of %d done %d times by %d threads", static_cast<int>(unit),
          static_cast<int>(num_units), times, team.size());
    break;
  }
  return launch.num_foreign.load();
}

void test_each_unit_once() {
  for (int num_threads = 1; num_threads <= 8; ++num_threads) {
    Team team(num_threads);
    pagecast::Shares shares(num_threads);
    for (int64_t num_units = 0; num_units <= 70; ++num_units) check_launch(team, shares, num_units);
    for (const int64_t num_units : {127, 500, 1031}) check_launch(team, shares, num_units);
  }
}

void test_others_do_what_a_thread_does_not_come_to() {
  Team team(3);
  pagecast::Shares shares(3);
  int foreign = 0;
  for (int run = 0; run < 5; ++run) foreign += check_launch(team, shares, 300, true);
  CHECK(foreign > 0, "%d units", foreign);
}

// The same pieces whoever cuts: own units in one piece, from its front and in few parts.
void test_a_thread_takes_its_own_from_the_front() {
  pagecast::Shares shares(2);
  shares.lay_out(1, 37, 0);
  shares.lay_out(1, 37, 1);
  std::vector<int64_t> cuts;
  int64_t at = 18;
  shares.share(1, 1, [&](int64_t first, int64_t last) {
    if (at < 37) {
      CHECK(first == at, "%d, not %d", static_cast<int>(first), static_cast<int>(at));
      at = last;
      cuts.push_back(last - first);
    } else {
      CHECK(last <= 18, "took %d again", static_cast<int>(last - 1));
    }
  });
  CHECK((cuts == std::vector<int64_t>{8, 6, 3, 1, 1}), "%zu cuts", cuts.size());
  int taken = 0;
  shares.share(1, 0, [&](int64_t first, int64_t last) { taken += static_cast<int>(last - first); });
  CHECK(taken == 0, "%d units left", taken);
  shares.share(0, 0, [&](int64_t, int64_t) { ++taken; });
  CHECK(taken == 0, "the other turn has units");
}

// A word from which another thread takes a unit after each look, from either end: what atomics show by
// chance only.
struct Raced {
  explicit Raced(uint64_t) {}
  uint64_t load(std::memory_order) {
    const uint64_t seen = value;
    const uint64_t first = seen >> 32, last = seen & 0xffffffffu;
    if (first < last) {
      ++(*times)[static_cast<size_t>(from_front ? first : last - 1)];
      value = from_front ? (first + 1) << 32 | last : first << 32 | (last - 1);
    }
    return seen;
  }
  void store(uint64_t desired, std::memory_order) { value = desired; }
  bool compare_exchange_weak(uint64_t& expected, uint64_t desired, std::memory_order order) {
    const bool same = value == expected;
    if (same)
      value = desired;
    else
      expected = load(order);
    return same;
  }

  uint64_t value = 0;
  static inline bool from_front = false;
  static inline std::vector<int>* times = nullptr;
};

// Where a kernel takes pairs no share has an odd number of units, but the last if they are odd.
void test_units_stay_in_pairs() {
  for (int num_threads = 1; num_threads <= 5; ++num_threads)
    for (int64_t num_units = 1; num_units < 80; ++num_units) {
      pagecast::Shares shares(num_threads);
      for (int thread = 0; thread < num_threads; ++thread) shares.lay_out(0, num_units, thread, 2);
      int64_t count = 0, num_odd = 0;
      for (int thread = num_threads; thread-- > 0;)
        shares.share(
            0, thread,
            [&](int64_t first, int64_t last) {
              count += last - first;
              num_odd += (last - first) % 2;
            },
            2);
      CHECK(count == num_units && num_odd == num_units % 2, "%d units, %d threads: %d done, %d odd shares",
            static_cast<int>(num_units), num_threads, static_cast<int>(count), static_cast<int>(num_odd));
    }
}

void test_what_others_take_is_left_to_them() {
  for (int num_units = 1; num_units < 40; ++num_units)
    for (int way = 0; way < 4; ++way) {
      std::vector<int> times(static_cast<size_t>(num_units), 0);
      Raced::times = &times;
      Raced::from_front = way % 2 == 0;
      pagecast::Range<Raced> range;
      range.set({0, num_units});
      const auto take = [&] { return way < 2 ? range.take_front() : range.take_back(); };
      for (pagecast::Units units = take(); !units.empty(); units = take())
        for (int64_t unit = units.first; unit < units.last; ++unit) ++times[static_cast<size_t>(unit)];
      for (const int count : times) CHECK(count == 1, "%d times, %d units, way %d", count, num_units, way);
    }
}

}  // namespace

int main() {
  test_each_unit_once();
  test_others_do_what_a_thread_does_not_come_to();
  test_a_thread_takes_its_own_from_the_front();
  test_units_stay_in_pairs();
  test_what_others_take_is_left_to_them();
  return report();
}
