// Events, and the host that asks for them or waits.
#include <Python.h>
#include <c10/util/Exception.h>

#include "graphs.h"

namespace simdev {

WithoutGil::WithoutGil() {
  if (Py_IsInitialized() && PyGILState_Check()) state = PyEval_SaveThread();
}
WithoutGil::~WithoutGil() {
  if (state) PyEval_RestoreThread(static_cast<PyThreadState*>(state));
}

void Event::finish() {
  {
    std::lock_guard held(mutex_);
    done_ = true;
    real_us_ = now_us();
  }
  changed_.notify_all();
}

bool Event::done() const {
  std::lock_guard held(mutex_);
  return done_;
}

double Event::real_us() const {
  std::lock_guard held(mutex_);
  return real_us_;
}

void Event::await_done() {
  WithoutGil free;
  std::unique_lock held(mutex_);
  // Without a limit a program that waits for a closed gate would hang without a word.
  TORCH_CHECK(changed_.wait_for(held, kStuck, [&] { return done_; }),
              "simdev: an event was waited for in vain; is a stream stalled?");
}

void Event::refuse_captured(const char* what) const {
  std::lock_guard held(world());
  if (capture && !capture->over) capture->refuse(std::string(what) + " an event that is captured");
  TORCH_CHECK(!capture, "simdev: operation not permitted on an event last recorded in a capturing stream");
  refuse_while_capturing((std::string(what) + " an event").c_str());
}

bool Event::query() {
  refuse_captured("the host asks for");
  bool is_done = done();
  if (costs().virtual_time) {
    if (virtual_us > host_virtual_us()) return false;
    // Due, though its thread may not have come to it; one behind a closed gate never does. That
    // thread may need the GIL and `world` for it, so whoever asks holds neither.
    WithoutGil free;
    while (!is_done && !any_gate_closed()) {
      std::unique_lock held(mutex_);
      is_done = changed_.wait_for(held, std::chrono::milliseconds(10), [&] { return done_; });
    }
  }
  if (is_done) host_learns(clock);
  return is_done;
}

void Event::wait() {
  refuse_captured("the host waits for");
  await_done();
  {
    std::lock_guard held(world());
    host_learns(clock);
    host_waits_until(virtual_us);
  }
  raise_failure();
}

}  // namespace simdev
