#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

namespace pagecast {
namespace {

// Longer than a launch's uneven end; whoever waits longer offers its core to others at every look.
constexpr std::chrono::microseconds kSpin{50};
// Longer than what a busy engine does between two steps: to wake a thread whose core sleeps takes 0.2 ms.
constexpr std::chrono::microseconds kAwake{1000};
// At a meeting. Who waits this long waits for a thread that has lost its CPU, and may give it its own. It
// looks by itself now and then, so that nobody has to tell it: whoever did would first wait until its own
// writes are seen.
constexpr std::chrono::microseconds kAwakeAtMeeting{150};
constexpr std::chrono::microseconds kNap{50};
// Before the clock is looked at: most waits end sooner, and what it reads is cold.
constexpr int kPausesPerLook = 32;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// A number of threads that memory can be had for, whatever was asked.
size_t clamped(int num_threads) { return static_cast<size_t>(std::clamp(num_threads, 1, Team::kMaxThreads)); }

std::vector<int> checked_cpus(std::vector<int> cpus, int num_threads) {
  if (cpus.empty()) return cpus;
  if (static_cast<int64_t>(cpus.size()) != num_threads) {
    throw std::invalid_argument("cpus: " + std::to_string(cpus.size()) + ", must be one for each of " +
                                std::to_string(num_threads) + " threads");
  }
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof allowed, &allowed);
  for (auto cpu = cpus.begin(); cpu != cpus.end(); ++cpu) {
    if (*cpu < 0 || *cpu >= CPU_SETSIZE || !CPU_ISSET(*cpu, &allowed))
      throw std::invalid_argument("cpus: " + std::to_string(*cpu) + " is none that this process may run on");
    if (std::find(cpus.begin(), cpu, *cpu) != cpu)
      throw std::invalid_argument("cpus: " + std::to_string(*cpu) + " is there twice");
  }
  return cpus;
}

void pin(pthread_t thread, int cpu) {
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(cpu, &only);
  if (pthread_setaffinity_np(thread, sizeof only, &only) != 0)
    throw std::invalid_argument("cpus: " + std::to_string(cpu) + " can't be had");
}

}  // namespace

Team::Team(int num_threads, std::vector<int> cpus)
    : size_(num_threads),
      owner_(getpid()),
      cpus_(checked_cpus(std::move(cpus), num_threads)),
      threads_(std::make_unique<std::vector<std::thread>>()),
      seen_on_(std::make_unique<std::atomic<int>[]>(clamped(num_threads))),
      met_(std::make_unique<Met[]>(clamped(num_threads))) {
  if (num_threads < 1 || num_threads > kMaxThreads) {
    throw std::invalid_argument("num_threads: " + std::to_string(num_threads) + ", must be 1 to " +
                                std::to_string(kMaxThreads));
  }
  threads_->reserve(static_cast<size_t>(size_ - 1));
  try {
    for (int thread = 1; thread < size_; ++thread) {
      threads_->emplace_back(&Team::serve, this, thread);
      if (!cpus_.empty()) pin(threads_->back().native_handle(), cpus_[static_cast<size_t>(thread)]);
    }
  } catch (...) {
    stop();
    throw;
  }
}

Team::~Team() {
  if (is_forked()) {
    (void)threads_.release();
  } else {
    stop();
  }
}

bool Team::is_forked() const { return size_ > 1 && getpid() != owner_; }

void Team::refuse_if_forked() const {
  if (is_forked()) {
    throw std::logic_error("a forked process has none of the team's threads: make a team of its own");
  }
}

void Team::close() {
  refuse_if_forked();
  if (in_use_.exchange(true, std::memory_order_acquire)) throw std::logic_error("the team is in use");
  closed_ = true;
  stop();
  in_use_.store(false, std::memory_order_release);
}

void Team::stop() {
  body_ = nullptr;
  runs_.fetch_add(1, std::memory_order_release);
  runs_.notify_all();
  for (std::thread& thread : *threads_) thread.join();
  threads_->clear();
}

void Team::serve(int thread) {
  uint32_t seen = 0;
  while (true) {
    wait_while(runs_, seen);
    ++seen;
    if (body_ == nullptr) return;
    note_cpu(thread);
    body_(context_, thread);
  }
}

void Team::wait_while(const std::atomic<uint32_t>& value, uint32_t old, Team* team) {
  using Clock = std::chrono::steady_clock;
  const auto changes = [&] {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (value.load(std::memory_order_acquire) != old) return true;
      pause();
    }
    return false;
  };
  if (changes()) return;
  const Clock::time_point start = Clock::now();
  do {
    if (changes()) return;
  } while (Clock::now() - start < kSpin);
  if (team != nullptr) team->leave_shared_cpu();
  const auto awake = team != nullptr ? kAwakeAtMeeting : kAwake;
  do {
    if (value.load(std::memory_order_acquire) != old) return;
    std::this_thread::yield();
  } while (Clock::now() - start < awake);
  if (team != nullptr) {
    while (value.load(std::memory_order_acquire) == old) std::this_thread::sleep_for(kNap);
    return;
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

namespace {
// Which thread of its run the calling one is.
thread_local int own_thread = 0;
}  // namespace

void Team::note_cpu(int thread) {
  own_thread = thread;
  seen_on_[static_cast<size_t>(thread)].store(sched_getcpu(), std::memory_order_relaxed);
}

void Team::leave_shared_cpu() {
  const int here = sched_getcpu();
  cpu_set_t allowed;
  if (here < 0 || pthread_getaffinity_np(pthread_self(), sizeof allowed, &allowed) != 0) return;
  cpu_set_t free = allowed;
  bool is_shared = false;
  for (int thread = 0; thread < size_; ++thread) {
    const int cpu = seen_on_[static_cast<size_t>(thread)].load(std::memory_order_relaxed);
    if (thread == own_thread || cpu < 0) continue;
    CPU_CLR(cpu, &free);
    is_shared = is_shared || cpu == here;
  }
  if (!is_shared || CPU_COUNT(&free) == 0) return;
  // A thread leaves a CPU at once when it may not be there any more; then it may be anywhere again.
  if (pthread_setaffinity_np(pthread_self(), sizeof free, &free) != 0) return;
  pthread_setaffinity_np(pthread_self(), sizeof allowed, &allowed);
  note_cpu(own_thread);
}

Team::Lease::Lease(Team& team) : team_(team) {
  // First: whoever was at work while the process forked is in use here for ever.
  team_.refuse_if_forked();
  if (team_.in_use_.exchange(true, std::memory_order_acquire)) {
    throw std::logic_error("the team is in use: one run at a time");
  }
  if (team_.closed_) {
    team_.in_use_.store(false, std::memory_order_release);
    throw std::logic_error("the team is closed");
  }
  // Here, as a run whose launches are all small needs no other thread.
  try {
    team_.pin_caller();
  } catch (...) {
    team_.in_use_.store(false, std::memory_order_release);
    throw;
  }
}

void Team::pin_caller() {
  if (cpus_.empty() || pinned_caller_ == std::this_thread::get_id()) return;
  pin(pthread_self(), cpus_.front());
  pinned_caller_ = std::this_thread::get_id();
}

Team::Lease::~Lease() { team_.in_use_.store(false, std::memory_order_release); }

void Team::Lease::run(Body body, void* context) {
  team_.body_ = body;
  team_.context_ = context;
  team_.runs_.fetch_add(1, std::memory_order_release);
  team_.runs_.notify_all();
  team_.note_cpu(0);
  body(context, 0);
}

}  // namespace pagecast
