#include "program.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string>

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

// An eighth of the core's own cache: the rest is for what the launch at hand works on.
int64_t ahead_bytes() {
  constexpr int64_t kLeast = 32 * 1024, kMost = 256 * 1024;
#ifdef _SC_LEVEL2_CACHE_SIZE
  return std::clamp(static_cast<int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE)) / 8, kLeast, kMost);
#else
  return kLeast;
#endif
}

void prefetch(const std::byte* line) { __builtin_prefetch(line, 0, 2); }

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

// Sets a flag while it lives.
class Running {
 public:
  explicit Running(std::atomic<bool>& flag) : flag_(flag) { flag_ = true; }
  ~Running() { flag_ = false; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  std::atomic<bool>& flag_;
};

void check_live(const char* name, int64_t live, int64_t capacity) {
  if (live < 0 || live > capacity) {
    throw std::invalid_argument(std::string(name) + ": " + std::to_string(live) + ", must be 0 to " +
                                std::to_string(capacity));
  }
}

}  // namespace

Program::Program(Team& team, int64_t max_tokens, int64_t max_rows, const char* kernel_set,
                 Activations activations)
    : team_(team),
      kernels_(kernels_for(kernel_set)),
      capacity_(checked_capacity(max_tokens, max_rows)),
      activations_(activations),
      body_ticks_(static_cast<size_t>(team.size())),
      max_ahead_bytes_(ahead_bytes()),
      shares_(team.size()) {}

Checks Program::checks(const char* op) const {
  if (is_running_) throw std::logic_error(std::string(op) + ": the program is running");
  return Checks(op, capacity_);
}

void Program::push(Extent extent, int64_t num_panels, int64_t cost, std::function<void(const Share&)> body) {
  launches_.push_back({extent, num_panels, nullptr, cost, std::move(body)});
}

void Program::push_rows(const View& out, int64_t cost, std::function<void(const Share&)> body) {
  push(out.extent, 0, cost, std::move(body));
  launches_.back().wrote = out;
}

size_t Program::num_launches() const {
  return static_cast<size_t>(std::count_if(launches_.begin(), launches_.end(),
                                           [](const Launch& launch) { return !launch.counts_to_next; }));
}

int64_t Program::run(const Sizes& live) {
  check_live("num_tokens", live.tokens, capacity_.tokens);
  check_live("num_rows", live.rows, capacity_.rows);
  check_live("num_logits", live.logits, capacity_.logits);
  Team::Lease lease(team_);
  const Running running(is_running_);
  prepare(live);
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const int64_t first_tick = ticks();
  run_serial(0, first_shared_, 0, [] {});
  if (first_shared_ < launches_.size())
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
  }
  size_t shared = launches_.size(), weights = launches_.size();
  for (size_t i = launches_.size(); i-- > 0;) {
    live_[i].next_shared = shared;
    live_[i].next_weights = weights;
    if (live_[i].is_serial) continue;
    shared = i;
    if (!launches_[i].weights.empty()) weights = i;
  }
  first_shared_ = shared;
  if (shared == launches_.size()) return;
  for (int thread = 0; thread < team_.size(); ++thread) shares_.lay_out(0, live_[shared].num_units, thread);
}

void Program::work(int thread) {
  const size_t none = launches_.size();
  size_t launch = first_shared_, fetched = none;
  WeightsAhead ahead;
  for (int turn = 0;; turn = 1 - turn) {
    run_shared(launch, turn, thread);
    const size_t next = live_[launch].next_shared, next_weights = live_[launch].next_weights;
    if (next != none) {
      shares_.lay_out(1 - turn, live_[next].num_units, thread);
      fetch(launches_[launch + 1]);
      fetch(live_[launch + 1]);
      if (next != launch + 1) {
        fetch(launches_[next]);
        fetch(live_[next]);
      }
    }
    // Where a launch without weights lies between, what is fetched is fetched at both meetings before.
    if (next_weights != fetched) ahead = weights_ahead(next_weights, thread);
    fetched = next_weights;
    const auto idle = [&] { return ahead.look(prefetch); };
    team_.meet([&] { run_serial(launch + 1, next, thread, idle); }, idle);
    // After the last meeting the caller may be in its next run already, or the program gone.
    if (next == none) return;
    launch = next;
  }
}

WeightsAhead Program::weights_ahead(size_t launch, int thread) const {
  if (launch == launches_.size()) return {};
  const int64_t num_units = live_[launch].num_units;
  return {launches_[launch].weights, own_begin(num_units, team_.size(), thread),
          own_begin(num_units, team_.size(), thread + 1), max_ahead_bytes_};
}

template <typename Idle>
void Program::run_serial(size_t first, size_t last, int thread, Idle&& idle) {
  for (size_t i = first; i < last; ++i) {
    const Live& live = live_[i];
    idle();
    if (live.num_units == 0) continue;
    const int64_t start = ticks();
    launches_[i].body({live.num_rows, 0, live.num_units, thread});
    body_ticks_[static_cast<size_t>(thread)][i] = ticks() - start;
  }
}

void Program::run_shared(size_t launch, int turn, int thread) {
  const int64_t start = ticks();
  const int64_t num_rows = live_[launch].num_rows;
  const auto& body = launches_[launch].body;
  shares_.share(turn, thread, [&](int64_t first, int64_t last) { body({num_rows, first, last, thread}); });
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
  std::vector<int64_t> longest;
  int64_t in_front = 0;
  for (size_t i = 0; i < launches_.size(); ++i) {
    const int64_t ticks = longest_ticks(i) + in_front;
    in_front = launches_[i].counts_to_next ? ticks : 0;
    if (!launches_[i].counts_to_next) longest.push_back(to_ns(ticks));
  }
  return longest;
}

int64_t Program::busy_ns() const {
  int64_t total = 0;
  for (const auto& of_launch : body_ticks_)
    total = std::accumulate(of_launch.begin(), of_launch.end(), total);
  return to_ns(total) / team_.size();
}

}  // namespace pagecast
