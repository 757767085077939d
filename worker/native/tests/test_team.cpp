// The team: every thread takes part in every run, meetings are meetings, idle threads sleep, closing ends
// them.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../src/team.h"
#include "check.h"

namespace {

using pagecast::Team;

// Plain numbers on purpose: the team's ordering is all that keeps them free of races.
struct Count {
  Team* team;
  int num_meetings;
  std::vector<int> steps;  // by thread
  int serial = 0;
  int uneven = 0;
};

void count_steps(void* context, int thread) {
  Count& count = *static_cast<Count*>(context);
  const int meetings = count.num_meetings;
  for (int meeting = 0; meeting < meetings; ++meeting) {
    ++count.steps[static_cast<size_t>(thread)];
    count.team->meet([&] {
      ++count.serial;
      for (const int steps : count.steps) count.uneven += steps != count.serial;
    });
  }
}

void test_every_thread_meets() {
  for (int num_threads = 1; num_threads <= 8; ++num_threads) {
    Team team(num_threads);
    Count count{&team, 5, std::vector<int>(static_cast<size_t>(num_threads), 0)};
    const int runs = 300 / num_threads;
    for (int run = 0; run < runs; ++run) {
      Team::Lease lease(team);
      lease.run(count_steps, &count);
      // Long enough for threads to fall asleep now and then.
      if (run % 50 == 7) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      CHECK(count.serial == 5 * (run + 1), "%d meetings after run %d of %d threads", count.serial, run,
            num_threads);
    }
    CHECK(count.uneven == 0, "%d times a thread was not there, %d threads", count.uneven, num_threads);
  }
}

// As count_steps, by meetings that nothing is done at.
void count_together(void* context, int thread) {
  Count& count = *static_cast<Count*>(context);
  const int meetings = count.num_meetings, first = count.steps[static_cast<size_t>(thread)];
  for (int meeting = 1; meeting <= meetings; ++meeting) {
    ++count.steps[static_cast<size_t>(thread)];
    count.team->meet_all(thread, [] { return false; });
    int uneven = 0;
    for (const int steps : count.steps) uneven += steps != first + meeting;
    // One after the other, by the meetings.
    for (size_t turn = 0; turn < count.steps.size(); ++turn) {
      if (turn == static_cast<size_t>(thread)) count.uneven += uneven;
      int looks = 3;
      count.team->meet_all(thread, [&] { return --looks > 0; });
    }
  }
  count.team->meet([] {});
}

void test_every_thread_meets_all() {
  for (int num_threads = 1; num_threads <= 6; ++num_threads) {
    Team team(num_threads);
    Count count{&team, 4, std::vector<int>(static_cast<size_t>(num_threads), 0)};
    for (int run = 1; run <= 60 / num_threads; ++run) {
      Team::Lease lease(team);
      lease.run(count_together, &count);
      if (run % 20 == 7) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      for (const int steps : count.steps)
        CHECK(steps == 4 * run, "%d steps after run %d of %d threads", steps, run, num_threads);
    }
    CHECK(count.uneven == 0, "%d times a thread was not there, %d threads", count.uneven, num_threads);
  }
}

void test_hand_over_under_load() {
  std::atomic<bool> stop{false};
  std::vector<std::thread> load;
  for (int i = 0; i < 3; ++i)
    load.emplace_back([&] {
      while (!stop.load()) {
      }
    });
  Team team(3);
  Count count{&team, 3, std::vector<int>(3, 0)};
  for (int run = 0; run < 40; ++run) {
    Team::Lease lease(team);
    lease.run(count_steps, &count);
  }
  CHECK(count.serial == 120 && count.uneven == 0, "%d meetings, %d uneven", count.serial, count.uneven);
  stop = true;
  for (std::thread& thread : load) thread.join();
}

// The context goes out of scope the moment run() returns: a thread that looked at it later would be caught.
void test_context_is_free_after_a_run() {
  Team team(4);
  for (int run = 0; run < 200; ++run) {
    auto count = std::make_unique<Count>(Count{&team, 1, std::vector<int>(4, 0)});
    Team::Lease lease(team);
    lease.run(count_steps, count.get());
  }
}

void test_idle_threads_sleep() {
  Team team(4);
  Count count{&team, 2, std::vector<int>(4, 0)};
  {
    Team::Lease lease(team);
    lease.run(count_steps, &count);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const std::clock_t before = std::clock();
  std::this_thread::sleep_for(std::chrono::seconds(2));
  const double busy_ms = 1e3 * static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
  CHECK(busy_ms < 20, "%.1f ms of processor time in 2 s of idling", busy_ms);
}

// Whoever waits does something else, until there is no more of it or the others have come.
void test_idle_work() {
  struct Idle {
    Team* team;
    std::atomic<int> looks{0}, late{0};
  };
  Team team(2);
  Idle idle{&team};
  const auto body = [](void* context, int thread) {
    Idle& idle = *static_cast<Idle*>(context);
    if (thread == 0)
      while (idle.looks.load() < 3) std::this_thread::yield();
    bool is_released = false;
    idle.team->meet(
        [&] {
          // The other one goes on while this one is at work alone.
          for (const int before = idle.looks.load(); idle.looks.load() < before + 3;)
            std::this_thread::yield();
        },
        [&] {
          idle.late += is_released;
          ++idle.looks;
          return thread == 1;
        });
    is_released = true;
    idle.team->meet([] {}, [] { return false; });
  };
  Team::Lease lease(team);
  lease.run(body, &idle);
  const int looks = idle.looks.load();
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  CHECK(looks >= 6 && idle.looks.load() == looks && idle.late == 0, "%d looks", looks);
}

template <typename Call>
bool refuses(Call&& call) {
  try {
    call();
  } catch (const std::logic_error&) {
    return true;
  }
  return false;
}

void test_one_run_at_a_time() {
  Team team(2);
  {
    Team::Lease lease(team);
    bool refused = false;
    std::thread([&] { refused = refuses([&] { Team::Lease second(team); }); }).join();
    CHECK(refused, "a second lease was given");
    CHECK(refuses([&] { team.close(); }), "closed while leased");
  }
  Team::Lease again(team);
}

void test_close() {
  for (int i = 0; i < 50; ++i) {
    Team team(1 + i % 8);
    if (i % 2 == 0) {
      team.close();
      CHECK(refuses([&] { Team::Lease lease(team); }), "a closed team runs");
      team.close();
    }
  }
  CHECK(refuses([] { Team team(0); }), "0 threads");
  CHECK(refuses([] { Team team(Team::kMaxThreads + 1); }), "too many threads");
}

// What `call` returns in a forked process, or -1 where a signal ended it; one that hangs is ended.
template <typename Call>
int in_child(Call&& call) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(call());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void test_a_forked_process_has_no_threads() {
  constexpr int kThreads = 8;
  auto team = std::make_unique<Team>(kThreads);
  const auto runs = [](Team& team) {
    Count count{&team, 3, std::vector<int>(static_cast<size_t>(team.size()), 0)};
    Team::Lease lease(team);
    lease.run(count_steps, &count);
    return count.serial == 3 && count.uneven == 0;
  };
  CHECK(runs(*team), "before the fork");
  const int refused = in_child([&] {
    const int lease = refuses([&] { Team::Lease lease(*team); });
    return lease + 2 * refuses([&] { team->close(); });
  });
  CHECK(refused == 3, "lease and close: %d", refused);
  const int dropped = in_child([&] {
    team.reset();
    return 7;
  });
  CHECK(dropped == 7, "the destructor: %d", dropped);
  // Leased as it forks, by a thread that the child has not.
  int leased = 0;
  {
    Team::Lease lease(*team);
    leased = in_child([&] {
      std::string what;
      try {
        Team::Lease second(*team);
      } catch (const std::logic_error& error) {
        what = error.what();
      }
      team.reset();
      return what.find("forked") != std::string::npos ? 7 : 0;
    });
  }
  CHECK(leased == 7, "a leased team: %d", leased);
  Team alone(1);
  CHECK(in_child([&] { return runs(alone) ? 7 : 0; }) == 7, "a team that has no kept threads");
  // Neither TSan's runtime nor QEMU's user mode can start a thread in a process forked from one with threads.
#if !defined(__SANITIZE_THREAD__) && !defined(PAGECAST_EMULATED)
  const int own = in_child([&] {
    team = std::make_unique<Team>(kThreads);
    const bool ran = runs(*team);
    team->close();
    return ran ? 7 : 0;
  });
  CHECK(own == 7, "a team of the child's own: %d", own);
#endif
  CHECK(runs(*team), "the parent's team, after its forks");
}

}  // namespace

int main() {
  test_every_thread_meets();
  test_every_thread_meets_all();
  test_hand_over_under_load();
  test_context_is_free_after_a_run();
  test_idle_threads_sleep();
  test_idle_work();
  test_one_run_at_a_time();
  test_close();
  test_a_forked_process_has_no_threads();
  return report();
}
