// A team's thread that waits for one that is away.
#include <chrono>
#include <ctime>
#include <thread>

#include "../src/team.h"
#include "check.h"

namespace {

using pagecast::Team;

// Who waits for a thread that is away gives its CPU to others, and goes on when that thread comes.
void test_waiting_at_a_meeting_leaves_the_cpu() {
  struct Away {
    Team* team;
    bool all;
    double waited_ms = 0;
  };
  for (const bool all : {false, true}) {
    Team team(2);
    Away away{&team, all};
    Team::Lease lease(team);
    lease.run(
        [](void* context, int thread) {
          auto& here = *static_cast<Away*>(context);
          if (thread == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
          const auto busy_ms = [] {
            timespec time{};
            clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
            return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
          };
          const double before = busy_ms();
          if (here.all)
            here.team->meet_all(thread, [] { return false; });
          else
            here.team->meet([] {});
          if (thread == 0) here.waited_ms = busy_ms() - before;
          here.team->meet([] {});
        },
        &away);
    CHECK(away.waited_ms < 50, "%g ms of CPU in 100 ms", away.waited_ms);
  }
}

}  // namespace

int main() {
  test_waiting_at_a_meeting_leaves_the_cpu();
  return report();
}
