#include "program.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string>

#include "shares.h"

namespace pagecast {
namespace {

// Below this, meeting once more costs what a second thread saves: about 2 us of work.
constexpr int64_t kSerialCost = 16384;

// Asks for what a thread reads of a launch before and while it begins it: the launch before has swept the
// cache.
template <typename T>
void fetch(const T& value) {
  for (size_t offset = 0; offset < sizeof(T); offset += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(&value) + offset);
}

Sizes checked_capacity(int64_t max_tokens, int64_t max_rows) {
  constexpr int64_t kMax = int64_t{1} << 24;
  const auto require = [](const char* name, int64_t value) {
    if (value < 1 || value > kMax) {
      throw std::invalid_argument(std::string(name) + ": " + std::to_string(value) + ", must be 1 to " +
                                  std::to_string(kMax));
    }
  };
  require("max_tokens", max_tokens);
  require("max_rows", max_rows);
  return {max_tokens, max_rows, max_rows};
}

void check_live(const char* name, int64_t live, int64_t capacity) {
  if (live < 0 || live > capacity) {
    throw std::invalid_argument(std::string(name) + ": " + std::to_string(live) + ", must be 0 to " +
                                std::to_string(capacity));
  }
}

}  // namespace

Program::Program(Team& team, int64_t max_tokens, int64_t max_rows, const char* kernel_set)
    : team_(team),
      kernels_(kernels_for(kernel_set)),
      capacity_(checked_capacity(max_tokens, max_rows)),
      body_ticks_(static_cast<size_t>(team.size())) {}

void Program::push(Extent extent, int64_t num_panels, int64_t cost, std::function<void(const Share&)> body) {
  launches_.push_back({extent, num_panels, nullptr, cost, std::move(body)});
}

int64_t Program::run(const Sizes& live) {
  check_live("num_tokens", live.tokens, capacity_.tokens);
  check_live("num_rows", live.rows, capacity_.rows);
  check_live("num_logits", live.logits, capacity_.logits);
  Team::Lease lease(team_);
  prepare(live);
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const int64_t first_tick = ticks();
  next_shared_ = run_serial(0, 0);
  if (next_shared_ < launches_.size())
    lease.run([](void* program, int thread) { static_cast<Program*>(program)->work(thread); }, this);
  const int64_t num_ticks = ticks() - first_tick;
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
  ns_per_tick_ = num_ticks > 0 ? static_cast<double>(ns) / static_cast<double>(num_ticks) : 0.0;
  int64_t kernel_ticks = 0;
  for (size_t i = 0; i < launches_.size(); ++i) kernel_ticks += longest_ticks(i);
  return to_ns(kernel_ticks);
}

void Program::prepare(const Sizes& live) {
  for (const auto& plan : plans_) plan->cut(live.rows, live.tokens);
  live_.resize(launches_.size());
  for (auto& times : body_ticks_) times.assign(launches_.size(), 0);
  for (size_t i = 0; i < launches_.size(); ++i) {
    const Launch& launch = launches_[i];
    Live& now = live_[i];
    now.num_rows = live.of(launch.extent);
    int64_t cost = launch.cost * now.num_rows;
    if (launch.attention != nullptr) {
      now.num_units = static_cast<int64_t>(launch.attention->items().size());
      cost = launch.cost * launch.attention->cost();
    } else {
      now.num_units = launch.num_panels == 0 || now.num_rows == 0 ? now.num_rows : launch.num_panels;
    }
    now.is_serial = team_.size() == 1 || cost <= kSerialCost || now.num_units < 2;
    if (!now.is_serial) last_shared_ = i;
  }
}

void Program::work(int thread) {
  const size_t last = last_shared_;
  for (size_t launch = next_shared_;; launch = next_shared_) {
    run_shared(launch, thread);
    if (launch != last) {
      fetch(launches_[launch + 1]);
      fetch(live_[launch + 1]);
    }
    team_.meet([&] {
      claimed_.store(0, std::memory_order_relaxed);
      next_shared_ = run_serial(launch + 1, thread);
    });
    // After the last meeting the caller may be in its next run already, or the program gone.
    if (launch == last) return;
  }
}

size_t Program::run_serial(size_t launch, int thread) {
  while (launch < launches_.size() && live_[launch].is_serial) {
    if (live_[launch].num_units > 0) run_timed(launch, 0, live_[launch].num_units, thread);
    ++launch;
  }
  return launch;
}

void Program::run_timed(size_t launch, int64_t first, int64_t last, int thread) {
  const int64_t start = ticks();
  launches_[launch].body({live_[launch].num_rows, first, last, thread});
  body_ticks_[static_cast<size_t>(thread)][launch] = ticks() - start;
}

void Program::run_shared(size_t launch, int thread) {
  const int64_t start = ticks();
  const Live& live = live_[launch];
  const auto& body = launches_[launch].body;
  share_units(claimed_, live.num_units, team_.size(), thread,
              [&](int64_t first, int64_t last) { body({live.num_rows, first, last, thread}); });
  body_ticks_[static_cast<size_t>(thread)][launch] = ticks() - start;
}

int64_t Program::longest_ticks(size_t launch) const {
  int64_t longest = 0;
  for (const auto& of_launch : body_ticks_) longest = std::max(longest, of_launch[launch]);
  return longest;
}

int64_t Program::to_ns(int64_t ticks) const {
  return static_cast<int64_t>(static_cast<double>(ticks) * ns_per_tick_);
}

std::vector<int64_t> Program::launch_ns() const {
  std::vector<int64_t> longest(launches_.size());
  for (size_t i = 0; i < longest.size(); ++i) longest[i] = to_ns(longest_ticks(i));
  return longest;
}

int64_t Program::busy_ns() const {
  int64_t total = 0;
  for (const auto& of_launch : body_ticks_)
    total = std::accumulate(of_launch.begin(), of_launch.end(), total);
  return to_ns(total) / team_.size();
}

}  // namespace pagecast
