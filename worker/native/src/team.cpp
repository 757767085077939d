#include "team.h"

#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <string>

namespace pagecast {
namespace {

// Longer than a launch's uneven end; whoever waits longer offers its core to others at every look.
constexpr std::chrono::microseconds kSpin{50};
// Longer than what a busy engine does between two steps: to wake a thread whose core sleeps takes 0.2 ms.
constexpr std::chrono::microseconds kAwake{1000};
constexpr int kPausesPerLook = 16;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace

Team::Team(int num_threads)
    : size_(num_threads), owner_(getpid()), threads_(std::make_unique<std::vector<std::thread>>()) {
  if (num_threads < 1 || num_threads > kMaxThreads) {
    throw std::invalid_argument("num_threads: " + std::to_string(num_threads) + ", must be 1 to " +
                                std::to_string(kMaxThreads));
  }
  threads_->reserve(static_cast<size_t>(size_ - 1));
  try {
    for (int thread = 1; thread < size_; ++thread) threads_->emplace_back(&Team::serve, this, thread);
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
    body_(context_, thread);
  }
}

void Team::wait_while(const std::atomic<uint32_t>& value, uint32_t old) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      pause();
    }
  } while (Clock::now() - start < kSpin);
  do {
    if (value.load(std::memory_order_acquire) != old) return;
    std::this_thread::yield();
  } while (Clock::now() - start < kAwake);
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
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
}

Team::Lease::~Lease() { team_.in_use_.store(false, std::memory_order_release); }

void Team::Lease::run(Body body, void* context) {
  team_.body_ = body;
  team_.context_ = context;
  team_.runs_.fetch_add(1, std::memory_order_release);
  team_.runs_.notify_all();
  body(context, 0);
}

}  // namespace pagecast
