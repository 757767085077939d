// Lets go of Python's lock while native code runs. Knows what a thread may do whose interpreter has ended.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace pagecast {

// Lets go of the lock, and takes it again at the end of the scope.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      // The interpreter has ended, so this thread, a daemon, is told to as well, by an unwinding that no
      // frame here may let through or stop: it would abort the process. It stays until the process is gone.
      while (true) pause();
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace pagecast
