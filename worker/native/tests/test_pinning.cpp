// Threads that are pinned run on their CPU alone, from the caller's first run on.
#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../src/team.h"
#include "check.h"

namespace {

using pagecast::Team;

std::vector<int> allowed_cpus() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  pthread_getaffinity_np(pthread_self(), sizeof allowed, &allowed);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
  return cpus;
}

template <typename Call>
std::string refusal(Call&& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

void test_pinned_threads() {
  struct Seen {
    Team* team;
    std::vector<std::vector<int>> cpus;
  };
  const std::vector<int> mine = allowed_cpus();
  const auto threads = static_cast<int>(mine.size() < 4 ? mine.size() : 4);
  const std::vector<int> chosen(mine.rbegin(), mine.rbegin() + threads);
  // In a thread of its own: the caller is pinned too.
  std::thread([&] {
    Team team(threads, chosen);
    Seen seen{&team, std::vector<std::vector<int>>(static_cast<size_t>(threads))};
    for (int run = 0; run < 2; ++run) {
      Team::Lease lease(team);
      lease.run(
          [](void* context, int thread) {
            Seen& seen = *static_cast<Seen*>(context);
            seen.cpus[static_cast<size_t>(thread)] = allowed_cpus();
            seen.team->meet([] {});
          },
          &seen);
    }
    // A lease is enough, as a run may need no other thread.
    std::thread([&] {
      Team::Lease lease(team);
      CHECK(allowed_cpus() == std::vector<int>{chosen[0]}, "a second caller");
    }).join();
    for (size_t thread = 0; thread < chosen.size(); ++thread)
      CHECK(seen.cpus[thread] == std::vector<int>{chosen[thread]}, "thread %zu", thread);
  }).join();
  CHECK(allowed_cpus() == mine, "who makes a team is pinned");
  CHECK(refusal([&] { Team team(2, {mine[0]}); }).find("cpus: 1, must be one") == 0, "too few");
  CHECK(refusal([&] { Team team(2, {mine[0], mine[0]}); }).find("twice") != std::string::npos, "twice");
  CHECK(refusal([] { Team team(1, {-1}); }).find("cpus: -1 is none") == 0, "negative");
  CHECK(refusal([] { Team team(1, {CPU_SETSIZE}); }).find("is none") != std::string::npos, "too high");
  CHECK(refusal([&] { Team team(1, {mine.back() + 1}); }).find("is none") != std::string::npos, "not there");
}

void allow(const std::vector<int>& cpus) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  for (const int cpu : cpus) CPU_SET(cpu, &allowed);
  pthread_setaffinity_np(pthread_self(), sizeof allowed, &allowed);
}

// Threads that were put on one CPU by somebody else, and may run on others.
void test_who_waits_leaves_a_shared_cpu() {
  struct Run {
    Team* team;
    std::vector<int> cpus;
    std::vector<int> seen;
    std::vector<std::vector<int>> allowed;
  };
  const std::vector<int> mine = allowed_cpus();
  if (mine.size() < 2) return;
  std::thread([&] {
    allow({mine[0]});
    Team team(2);
    const auto run = [&](const std::vector<int>& cpus) {
      Run run{&team, cpus, {-1, -1}, {{}, {}}};
      Team::Lease lease(team);
      lease.run(
          [](void* context, int thread) {
            Run& run = *static_cast<Run*>(context);
            allow(run.cpus);
            // Longer than the other one spins, and not so long that it sleeps.
            const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(500);
            while (thread == 1 && std::chrono::steady_clock::now() < until) continue;
            run.team->meet([] {});
            run.seen[static_cast<size_t>(thread)] = sched_getcpu();
            run.allowed[static_cast<size_t>(thread)] = allowed_cpus();
            run.team->meet([] {});
          },
          &run);
      CHECK(run.allowed[0] == cpus && run.allowed[1] == cpus, "where they may run has changed");
      return run.seen;
    };
    const std::vector<int> together = run({mine[0]});
    CHECK(together == std::vector<int>(2, mine[0]), "who is bound stays");
    int times_apart = 0;  // not always: another process may be in the way
    for (int i = 0; i < 20; ++i) {
      const std::vector<int> seen = run(mine);
      times_apart += seen[0] != seen[1];
    }
    CHECK(times_apart > 0, "on one CPU in 20 runs");
  }).join();
}

}  // namespace

int main() {
  test_pinned_threads();
  test_who_waits_leaves_a_shared_cpu();
  return report();
}
