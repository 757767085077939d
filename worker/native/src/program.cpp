#include "program.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "sampler.h"

namespace pagecast {
namespace {

// Products take pairs of panels at their best.
constexpr uint8_t kPanelsAtOnce = 2;

// Below this, meeting once more costs what a second thread saves: about 2 us of work.
constexpr int64_t kSerialCost = 16384;

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

Checks Program::checks(const char* op) {
  if (is_running_) throw std::logic_error(std::string(op) + ": the program is running");
  last_sizes_.reset();
  return Checks(op, capacity_);
}

void Program::push(Extent extent, int64_t num_panels, int64_t cost, Body body) {
  launches_.push_back({extent, num_panels, nullptr, cost, std::move(body)});
}

void Program::push_rows(const View& out, int64_t cost, Body body) {
  push(out.extent, 0, cost, std::move(body));
  launches_.back().wrote = out;
}

size_t Program::num_launches() const {
  return static_cast<size_t>(std::count_if(launches_.begin(), launches_.end(),
                                           [](const Launch& launch) { return !launch.counts_to_next; }));
}

int64_t Program::run(const Sizes& live) {
  Team::Lease lease(team_);
  run(lease, live, nullptr);
  return kernel_ns();
}

Program::Times Program::run_and_draw(const Sizes& live, Sampler& sampler, int64_t num_draws,
                                     const DrawEntry* entries, int64_t num_entries) {
  Team::Lease lease(team_);
  sampler.prepare(team_, num_draws, entries, num_entries);
  run(lease, live, &sampler);
  return {kernel_ns(), to_ns(sampler.longest_ticks())};
}

void Program::run(Team::Lease& lease, const Sizes& live, Sampler* sampler) {
  check_live("num_tokens", live.tokens, capacity_.tokens);
  check_live("num_rows", live.rows, capacity_.rows);
  check_live("num_logits", live.logits, capacity_.logits);
  const Running running(is_running_);
  prepare(live);
  sampler_ = sampler;
  run_serial(0, first_shared_, 0, [] {});
  if (first_shared_ < launches_.size() || draws_shared())
    lease.run([](void* program, int thread) { static_cast<Program*>(program)->work(thread); }, this);
  else if (sampler != nullptr)
    sampler->draw_all(0);
  sampler_ = nullptr;
  ns_per_tick_ = tick_length_.ns();
}

bool Program::draws_shared() const { return sampler_ != nullptr && sampler_->is_shared(); }

void Program::prepare(const Sizes& live) {
  const std::optional<Sizes> last = std::exchange(last_sizes_, std::nullopt);
  for (const auto& plan : plans_) plan->cut(live.rows, live.tokens);
  bool relinks = last != live;
  if (relinks) set_sizes(live);
  for (const Attending& each : attending_) {
    const auto num_units = static_cast<int64_t>(each.plan->items().size());
    if (set_units(each.launch, num_units, each.cost * each.plan->cost())) relinks = true;
  }
  if (relinks) link_shared();
  last_sizes_ = live;
  for (auto& times : body_ticks_) times.assign(launches_.size(), 0);
  if (first_shared_ == launches_.size()) return;
  for (int thread = 0; thread < team_.size(); ++thread)
    shares_.lay_out(0, live_[first_shared_].num_units, thread, live_[first_shared_].at_once);
}

void Program::set_sizes(const Sizes& live) {
  live_.resize(launches_.size());
  attending_.clear();
  for (size_t i = 0; i < launches_.size(); ++i) {
    const Launch& launch = launches_[i];
    const int64_t num_rows = live.of(launch.extent);
    live_[i].body = launch.body.reference();
    live_[i].weights = launch.weights;
    live_[i].num_rows = static_cast<uint32_t>(num_rows);
    live_[i].at_once = 1;
    if (launch.attention != nullptr) {
      attending_.push_back({i, launch.attention, launch.cost});
    } else {
      const bool by_panels = launch.num_panels != 0 && num_rows != 0;
      if (by_panels) live_[i].at_once = kPanelsAtOnce;
      set_units(i, by_panels ? launch.num_panels : num_rows, launch.cost * num_rows);
    }
  }
}

bool Program::set_units(size_t launch, int64_t num_units, int64_t cost) {
  Live& live = live_[launch];
  const bool was_serial = live.is_serial;
  live.num_units = static_cast<uint32_t>(num_units);
  live.is_serial = team_.size() == 1 || cost <= kSerialCost || num_units < 2;
  return live.is_serial != was_serial;
}

void Program::link_shared() {
  auto shared = static_cast<uint32_t>(launches_.size()), weights = shared;
  for (auto i = shared; i-- > 0;) {
    live_[i].next_shared = shared;
    live_[i].next_weights = weights;
    if (live_[i].is_serial) continue;
    shared = i;
    if (!live_[i].weights.empty()) weights = i;
  }
  first_shared_ = shared;
}

void Program::work(int thread) {
  const size_t none = launches_.size();
  size_t launch = first_shared_, fetched = none;
  Sampler* const sampler = sampler_;
  const bool shares_draws = draws_shared();
  WeightsAhead ahead;
  for (int turn = 0; launch != none; turn = 1 - turn) {
    const size_t next = live_[launch].next_shared, next_weights = live_[launch].next_weights;
    fetch_next(launch);
    // Long before the meeting, which would wait until others can see it.
    if (next != none) shares_.lay_out(1 - turn, live_[next].num_units, thread, live_[next].at_once);
    run_shared(launch, turn, thread);
    // Where a launch without weights lies between, what is fetched is fetched at both meetings before.
    if (next_weights != fetched) ahead = weights_ahead(next_weights, thread);
    fetched = next_weights;
    const auto idle = [&] { return ahead.look(prefetch); };
    const auto serial = [&] {
      run_serial(launch + 1, next, thread, idle);
      if (next == none && sampler != nullptr && !shares_draws) sampler->draw_all(thread);
    };
    if (next == launch + 1 && next != none)
      team_.meet_all(thread, idle);
    else
      team_.meet(serial, idle);
    // After the last meeting the caller may be in its next run already, or the program gone.
    launch = next;
  }
  if (!shares_draws) return;
  sampler->draw_share(thread);
  team_.meet([] {});
}

void Program::fetch_next(size_t launch) const {
  constexpr size_t kListAhead = 4;
  const size_t next = live_[launch].next_shared;
  for (size_t i = launch + 1; i < live_.size() && i <= next; ++i) {
    live_[i].body.fetch();
    __builtin_prefetch(live_[i].weights.data());
  }
  for (size_t i = next + 1; i < live_.size() && i <= next + kListAhead; ++i) __builtin_prefetch(&live_[i]);
}

WeightsAhead Program::weights_ahead(size_t launch, int thread) const {
  if (launch == launches_.size()) return {};
  const int64_t num_units = live_[launch].num_units, at_once = live_[launch].at_once;
  return {live_[launch].weights, own_begin(num_units, team_.size(), thread, at_once),
          own_begin(num_units, team_.size(), thread + 1, at_once), max_ahead_bytes_};
}

template <typename Idle>
void Program::run_serial(size_t first, size_t last, int thread, Idle&& idle) {
  for (size_t i = first; i < last; ++i) {
    const Live& live = live_[i];
    idle();
    if (live.num_units == 0) continue;
    const int64_t start = ticks();
    live.body({live.num_rows, 0, live.num_units, thread});
    body_ticks_[static_cast<size_t>(thread)][i] = ticks() - start;
  }
}

void Program::run_shared(size_t launch, int turn, int thread) {
  const int64_t start = ticks();
  const Live& live = live_[launch];
  shares_.share(
      turn, thread, [&](int64_t first, int64_t last) { live.body({live.num_rows, first, last, thread}); },
      live.at_once);
  body_ticks_[static_cast<size_t>(thread)][launch] = ticks() - start;
}

int64_t Program::kernel_ns() const {
  int64_t kernel_ticks = 0;
  for (size_t i = 0; i < launches_.size(); ++i) kernel_ticks += longest_ticks(i);
  return to_ns(kernel_ticks);
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
