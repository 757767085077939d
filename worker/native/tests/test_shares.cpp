// The threads of a launch do each of its units once, however they come to it.
#include <atomic>
#include <cstdint>
#include <vector>

#include "../src/shares.h"
#include "../src/team.h"
#include "check.h"

namespace {

using pagecast::Team;

struct Launch {
  Team* team;
  int64_t num_units;
  std::vector<std::atomic<int>> times;  // by unit
  std::atomic<int64_t> claimed{0};
};

void do_launch(void* context, int thread) {
  Launch& launch = *static_cast<Launch*>(context);
  const int num_threads = launch.team->size();
  pagecast::share_units(launch.claimed, launch.num_units, num_threads, thread,
                        [&](int64_t first, int64_t last) {
                          for (int64_t unit = first; unit < last; ++unit)
                            launch.times[static_cast<size_t>(unit)].fetch_add(1, std::memory_order_relaxed);
                        });
  launch.team->meet([] {});
}

void check_launch(Team& team, int64_t num_units) {
  Launch launch{&team, num_units, std::vector<std::atomic<int>>(static_cast<size_t>(num_units) + 1), 0};
  {
    Team::Lease lease(team);
    lease.run(do_launch, &launch);
  }
  for (int64_t unit = 0; unit < num_units; ++unit) {
    const int times = launch.times[static_cast<size_t>(unit)].load();
    if (times == 1) continue;
    CHECK(false, "unit %d of %d done %d times by %d threads", static_cast<int>(unit),
          static_cast<int>(num_units), times, team.size());
    return;
  }
}

void test_each_unit_once() {
  for (int num_threads = 1; num_threads <= 8; ++num_threads) {
    Team team(num_threads);
    for (int64_t num_units = 0; num_units <= 70; ++num_units) check_launch(team, num_units);
    for (const int64_t num_units : {127, 500, 1031}) check_launch(team, num_units);
  }
}

// A counter from which another thread takes a unit after each look: what atomics show by chance only.
struct Raced {
  int64_t value = 0;
  std::vector<int> times;

  int64_t load(std::memory_order) {
    const int64_t seen = value;
    if (seen < static_cast<int64_t>(times.size())) ++times[static_cast<size_t>(value++)];
    return seen;
  }
  void store(int64_t desired, std::memory_order) { value = desired; }
  bool compare_exchange_weak(int64_t& expected, int64_t desired, std::memory_order) {
    const bool same = value == expected;
    (same ? value : expected) = same ? desired : value;
    return same;
  }
};

void test_what_others_claim_is_left_to_them() {
  // Too few for shares of one's own, so that units are counted from 0.
  for (int num_units = 1; num_units < 16; ++num_units) {
    Raced claimed{0, std::vector<int>(static_cast<size_t>(num_units), 0)};
    pagecast::share_units(claimed, num_units, 8, 3, [&](int64_t first, int64_t last) {
      for (int64_t unit = first; unit < last; ++unit) ++claimed.times[static_cast<size_t>(unit)];
    });
    for (const int times : claimed.times) CHECK(times == 1, "%d times, %d units", times, num_units);
  }
}

}  // namespace

int main() {
  test_each_unit_once();
  test_what_others_claim_is_left_to_them();
  return report();
}
