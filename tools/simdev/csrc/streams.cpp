#include "streams.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <thread>

#include "graphs.h"

namespace simdev {
namespace {
std::mutex notes;            // guards what worker threads write; they never take `world`
std::vector<Row> timeline;   // hold notes
std::string failure;         // hold notes
double failure_us = 0;       // when the device comes to it, virtual; hold notes
std::string fail_prefix;     // hold world
int fail_after = 0;          // hold world
double host_us = 0;          // virtual; hold world
std::atomic<int> next_stream[kDevices];

struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  int closed = 0, generation = 0;
};
Gate& gate() {
  static auto* one = new Gate;
  return *one;
}

void fail(const std::string& what, double at_us = 0) {
  std::lock_guard held(notes);
  if (!failure.empty()) return;
  failure = what;
  failure_us = at_us;
}

thread_local int device_of_thread = 0;
thread_local std::array<int, kDevices> stream_of_thread = [] {
  std::array<int, kDevices> ids{};
  for (int i = 0; i < kDevices; i++) ids[i] = i;
  return ids;
}();
}  // namespace

double now_us() {
  static const auto start = std::chrono::steady_clock::now();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

bool any_gate_closed() {
  std::lock_guard held(gate().mutex);
  return gate().closed > 0;
}

Costs& costs() {
  static Costs all;
  return all;
}

// ---- streams -----------------------------------------------------------------------------------

void Stream::push(Task task) {
  {
    std::lock_guard held(mutex_);
    if (!started_) {
      started_ = true;
      random_.seed(id);
      std::thread([this] { work(); }).detach();
    }
    queue_.push_back(std::move(task));
  }
  filled_.notify_one();
}

void Stream::push_silently(std::function<void()> run) { push({"", 0, now_us(), 0, 0, std::move(run)}); }

void Stream::work() {
  at::set_num_threads(1);
  at::AutoDispatchBelowADInplaceOrView below;
  c10::NoGradGuard no_grad;
  while (true) {
    Task task;
    {
      std::unique_lock held(mutex_);
      filled_.wait(held, [&] { return !queue_.empty(); });
      task = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
    }
    const bool real = !costs().virtual_time;
    const double start = now_us();
    try {
      if (real && task.cost_us > 0)
        std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(task.cost_us));
      task.run();
    } catch (const std::exception& error) {
      fail(task.name + ": " + error.what());
    }
    task.run = nullptr;
    if (costs().log && !task.name.empty()) {
      std::lock_guard held(notes);
      timeline.push_back({id, task.name, task.queued, real ? start : task.start, real ? now_us() : task.end});
    }
    {
      std::lock_guard held(mutex_);
      busy_ = false;
    }
    emptied_.notify_all();
  }
}

void Stream::tick() {
  merge(clock, host_clock());
  clock[id]++;
}

void Stream::make_room() {
  const size_t limit = costs().queue_limit;
  if (limit == 0) return;
  WithoutGil free;
  std::unique_lock held(mutex_);
  TORCH_CHECK(emptied_.wait_for(held, kStuck, [&] { return queue_.size() < limit; }),
              "simdev: the queue of stream ", id, " stays full; is it stalled?");
}

void Stream::launch(const std::string& name, double cost_us, const std::function<void()>& accesses, std::function<void()> run) {
  {
    std::lock_guard held(world());
    if (capture) return capture->add_task(*this, name, cost_us, accesses, std::move(run));
  }
  make_room();
  std::lock_guard held(world());
  host_us += costs().host_us;
  enqueue(name, cost_us, accesses, std::move(run));
}

void Stream::enqueue(const std::string& name, double cost_us, const std::function<void()>& accesses, std::function<void()> run) {
  if (costs().jitter && cost_us > 0) cost_us *= std::uniform_real_distribution<double>(0, 2)(random_);
  tick();
  accesses();
  const double start = std::max(virtual_us_, host_us);
  virtual_us_ = start + cost_us;
  if (fail_after > 0 && name.rfind(fail_prefix, 0) == 0 && --fail_after == 0) {
    const auto what = name + ": a fault was asked for";
    if (costs().virtual_time) fail(what, virtual_us_);  // when it is told is a matter of time, not of threads
    run = [what, now = !costs().virtual_time] { if (now) fail(what); };
  }
  push({name, cost_us, costs().virtual_time ? host_us : now_us(), start, virtual_us_, std::move(run)});
}

std::shared_ptr<Event> Stream::record() {
  std::lock_guard held(world());
  if (capture) return capture->record(*this);
  tick();
  auto event = std::make_shared<Event>(clock, std::max(virtual_us_, host_us));
  push_silently([event] { event->finish(); });
  return event;
}

void Stream::wait_for(const std::shared_ptr<Event>& event) {
  std::lock_guard held(world());
  if (event->capture) {
    TORCH_CHECK(!event->capture->over, "simdev: operation not permitted on an event last recorded in a capturing stream");
    if (capture && capture != event->capture)
      capture->refuse("stream " + std::to_string(id) + " waits for an event of another capture");
    return event->capture->wait(*this, *event);
  }
  if (capture) capture->refuse("stream " + std::to_string(id) + " waits for an event from outside of the capture");
  merge(clock, event->clock);
  virtual_us_ = std::max(virtual_us_, event->virtual_us);
  push_silently([event] { event->await_done(); });
}

void Stream::drain() {
  WithoutGil free;
  std::unique_lock held(mutex_);
  TORCH_CHECK(emptied_.wait_for(held, kStuck, [&] { return queue_.empty() && !busy_; }),
              "simdev: stream ", id, " was waited for in vain; is it stalled?");
}

void Stream::synchronize() {
  Clock seen;
  double until;
  {
    std::lock_guard held(world());
    if (capture) capture->refuse("the host waits for stream " + std::to_string(id));
    refuse_while_capturing("the host waits for a stream");
    seen = clock;
    until = virtual_us_;
  }
  drain();
  {
    std::lock_guard held(world());
    host_learns(seen);
    host_waits_until(until);
  }
  raise_failure();
}

bool Stream::query() {
  {
    std::lock_guard held(world());
    if (capture) capture->refuse("the host asks for stream " + std::to_string(id));
    refuse_while_capturing("the host asks for a stream");
  }
  std::lock_guard held(mutex_);
  return queue_.empty() && !busy_;
}

void Stream::close_gate() {
  std::lock_guard all(world());
  int mine;
  {
    std::lock_guard held(gate().mutex);
    gate().closed++;
    mine = gate().generation;
  }
  push_silently([mine] {
    std::unique_lock held(gate().mutex);
    gate().changed.wait(held, [&] { return gate().generation != mine; });
  });
}

void open_gates() {
  {
    std::lock_guard held(gate().mutex);
    gate().closed = 0;
    gate().generation++;
  }
  gate().changed.notify_all();
}

Stream& stream(int id) {
  static auto* all = [] {
    auto* made = new Stream[kStreams];
    for (int i = 0; i < kStreams; i++) {
      made[i].id = i;
      made[i].device = i < kDevices ? i : i < kFirstBranch ? (i - kDevices) / kPool : (i - kFirstBranch) / kBranches;
    }
    return made;
  }();
  return all[id];
}

Stream& default_stream(int device) { return stream(device); }
Stream& next_of_pool(int device) { return stream(kDevices + device * kPool + next_stream[device]++ % kPool); }
Stream& current_stream(int device) { return stream(stream_of_thread[device]); }
void set_current_stream(Stream& stream) { stream_of_thread[stream.device] = stream.id; }
int current_device() { return device_of_thread; }

void set_current_device(int device) {
  TORCH_CHECK(device < kDevices, "simdev: there is no device ", device);
  if (device >= 0) device_of_thread = device;
}

void synchronize_device(int device) {
  refuse_capturing_device(device, "the host waits for the device");
  for (int id = 0; id < kStreams; id++)
    if (stream(id).device == device) stream(id).synchronize();
}

// ---- time, faults ------------------------------------------------------------------------------

double host_virtual_us() {
  std::lock_guard held(world());
  return host_us;
}

void host_waits_until(double virtual_us) { host_us = std::max(host_us, virtual_us); }

void fail_later(const std::string& prefix, int after) {
  std::lock_guard held(world());
  fail_prefix = prefix;
  fail_after = after;
}

void raise_failure() {
  std::string text;
  const double host = host_virtual_us();
  {
    std::lock_guard held(notes);
    if (!costs().virtual_time || failure_us <= host) std::swap(text, failure);
  }
  TORCH_CHECK(text.empty(), "simdev: an operation on the device failed: ", text);
}

std::vector<Row> take_timeline() {
  std::lock_guard held(notes);
  return std::exchange(timeline, {});
}

}  // namespace simdev
