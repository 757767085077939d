// Threads that are kept between runs. Knows nothing of programs: it hands one function to all its threads and
// gives them a barrier to meet at.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace pagecast {

// `num_threads - 1` kept threads and the caller. A run costs one hand-over; between runs the kept threads
// stay awake for a moment, then sleep. One run at a time. A child of fork() has none of the kept threads: a
// team that has any refuses to run or close there, and its destructor leaves them alone.
class Team {
 public:
  using Body = void (*)(void* context, int thread);

  // With `cpus`, one for each thread, thread i runs on cpus[i] alone; the caller does so from its first run
  // on. Throws std::invalid_argument unless 1 <= num_threads <= kMaxThreads and `cpus` is empty or names
  // num_threads different CPUs that this thread may run on.
  explicit Team(int num_threads, std::vector<int> cpus = {});
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Joins the kept threads; a closed team refuses to run. Throws std::logic_error while it is in use,
  // and in a forked process.
  void close();

  // The right to run, which pins the caller: throws std::logic_error where another thread has it, the team is
  // closed or its threads are another process's.
  class Lease {
   public:
    explicit Lease(Team& team);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    // body(context, thread) on every thread; returns when the caller's part (thread 0) does. A body must end
    // with meet(), so that all are done by then, and must not throw.
    void run(Body body, void* context);

   private:
    Team& team_;
  };

  // Called by every thread of a run. The last to arrive calls serial() while the others wait for it, then all
  // go on; what any thread wrote before is seen by all. Who waits calls idle() first, for as long as it
  // returns true: it must return at once.
  template <typename Serial, typename Idle>
  void meet(Serial&& serial, Idle&& idle) {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      serial();
      round_.store(round + 1, std::memory_order_release);
    } else {
      do {
        if (round_.load(std::memory_order_acquire) != round) return;
      } while (idle());
      wait_while(round_, round, this);
    }
  }
  template <typename Serial>
  void meet(Serial&& serial) {
    meet(std::forward<Serial>(serial), [] { return false; });
  }

  // As meet() with nothing to do in between, but not as the end of a body. In a team of few threads each
  // tells of itself and looks for the others, so that who comes last waits neither for its own writes nor to
  // be counted.
  template <typename Idle>
  void meet_all(int thread, Idle&& idle) {
    if (size_ > kMostThreadsThatLook) return meet([] {}, std::forward<Idle>(idle));
    std::atomic<uint32_t>& own = met_[static_cast<size_t>(thread)].times;
    const uint32_t before = own.load(std::memory_order_relaxed);
    own.store(before + 1, std::memory_order_release);
    bool is_idle = true;
    for (int step = 1; step < size_; ++step) {
      const int other = thread + step < size_ ? thread + step : thread + step - size_;
      // Another thread is at most one meeting ahead: for the next it needs this one.
      const std::atomic<uint32_t>& times = met_[static_cast<size_t>(other)].times;
      while (times.load(std::memory_order_acquire) == before) {
        if (is_idle && (is_idle = idle())) continue;
        wait_while(times, before, this);
      }
    }
  }

  static constexpr int kMaxThreads = 256;

 private:
  // Beyond it each would look for too many others.
  static constexpr int kMostThreadsThatLook = 4;

  // Returns once `value` is no longer `old`: spins, then yields, then sleeps until it is told, or, at a
  // meeting of `team`, looks again now and then. Who has spun in vain there moves to another CPU if it shares
  // its own with one that it waits for.
  static void wait_while(const std::atomic<uint32_t>& value, uint32_t old, Team* team = nullptr);
  // Of the calling thread, as thread `thread` of the run at hand.
  void note_cpu(int thread);
  void leave_shared_cpu();
  void serve(int thread);
  void stop();
  void pin_caller();
  bool is_forked() const;
  void refuse_if_forked() const;

  const int size_;
  const pid_t owner_;
  const std::vector<int> cpus_;
  std::thread::id pinned_caller_;  // only touched by who holds in_use_
  std::atomic<bool> in_use_{false};
  bool closed_ = false;  // only touched by who holds in_use_
  // By pointer, so that a forked process can leak them: there they can be neither joined nor destroyed.
  std::unique_ptr<std::vector<std::thread>> threads_;
  // Where each thread was last seen. A system keeps two threads on one CPU for seconds where both of them are
  // always ready to run, whatever the other CPUs do.
  std::unique_ptr<std::atomic<int>[]> seen_on_;

  // How often each thread has been at meet_all().
  struct alignas(64) Met {
    std::atomic<uint32_t> times{0};
  };
  std::unique_ptr<Met[]> met_;

  // Written by the caller before it raises `runs_`; a null body ends a thread.
  Body body_ = nullptr;
  void* context_ = nullptr;

  // Each on a cache line of its own: waiters read one while others write the next.
  alignas(64) std::atomic<uint32_t> runs_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

}  // namespace pagecast
